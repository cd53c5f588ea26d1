"""Write the stand-alone tuned library: sources, cubins, dispatch tables, the public functions."""

from kgen.emit.contents import Contents, read_contents
from kgen.emit.emit import PACKAGE, Emitted, emit
from kgen.emit.files import write_all
from kgen.emit.values import SafeKernel, Winner

__all__ = [
    "PACKAGE", "Contents", "Emitted", "SafeKernel", "Winner", "emit", "read_contents", "write_all",
]
