"""Write the stand-alone tuned library: sources, cubins, dispatch tables, the public functions."""

from kgen.emit.emit import Emitted, emit
from kgen.emit.values import SafeKernel, Winner

__all__ = ["Emitted", "SafeKernel", "Winner", "emit"]
