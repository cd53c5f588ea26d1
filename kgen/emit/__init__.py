"""Write the stand-alone tuned library: sources, cubins, dispatch tables, the public functions."""

from kgen.emit.contents import Contents, read_contents
from kgen.emit.emit import PACKAGE, Emitted, emit, no_library, renew
from kgen.emit.files import write_all
from kgen.emit.values import SafeKernel, Winner

__all__ = [
    "PACKAGE", "Contents", "Emitted", "SafeKernel", "Winner", "emit", "no_library",
    "read_contents", "renew", "write_all",
]
