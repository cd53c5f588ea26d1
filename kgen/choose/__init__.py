"""Pick the winner among finalists."""

from kgen.choose.choose import Entrant, pick

__all__ = ["Entrant", "pick"]
