"""Write the stand-alone tuned library: sources, cubins, dispatch tables, the public functions."""

from kgen.emit.common_files import LICENCE
from kgen.emit.contents import Contents, read_contents
from kgen.emit.emit import Emitted, emit, emit_rules, renew, rewrite
from kgen.emit.files import write_all
from kgen.emit.loaded_library import LoadedLibrary, Served, require_operator
from kgen.emit.published import PACKAGE, no_library, published_rows, published_table
from kgen.emit.rankings import write_rankings
from kgen.emit.renewal import StaleRow
from kgen.emit.state import TUNED, RowState
from kgen.emit.untuned import untuned_safe_kernels
from kgen.emit.values import SafeKernel, Winner

__all__ = [
    "LICENCE", "PACKAGE", "TUNED", "Contents", "Emitted", "LoadedLibrary", "RowState",
    "SafeKernel", "Served", "StaleRow", "Winner", "emit", "emit_rules", "no_library",
    "published_rows", "published_table", "read_contents", "renew", "require_operator",
    "rewrite", "untuned_safe_kernels", "write_all", "write_rankings",
]
