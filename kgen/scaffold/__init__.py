"""Write the files of a new operator. See `kgen.scaffold.scaffold`."""

from kgen.scaffold.scaffold import write_operator

__all__ = ["write_operator"]
