"""Detects kernels whose source compiles to different code on the host layer than for a GPU.

The host run of a certificate runs the kernel's own source, in four orders of threads and under
AddressSanitizer. It proves nothing about a kernel that tests which compiler compiles it and, for
example, omits a barrier or a bounds check only for a GPU. The device headers may test this; a
rendered kernel has no need to.
"""

from __future__ import annotations

import re

from kgen.model.artifact import Rendered
from kgen.model.source_text import bare_text

# Names that are reserved for compilers' macros, except those of the CUDA language; types and limits
# whose size differs in a GPU's compiler; and the attribute that hides code from the host run.
_OF_CUDA = (
    "global|device|host|shared|constant|managed|launch_bounds|maxnreg|cluster_dims|block_size"
    "|grid_constant|restrict|forceinline|noinline|inline|inline_hint|align|attribute|volatile|asm"
)
_ASKS = re.compile(
    rf"\b(KGEN_HOST|KGEN_ARCH|__(?!(?:{_OF_CUDA})__)[A-Za-z]\w*__|__CUDA_ARCH\w*|__cplusplus"
    r"|__SANITIZE_\w+|no_sanitize\w*|__has_\w+|__func__|(?:long\s+double|double\s+long)|wchar_t"
    r"|errno|__errno_location|mmap64?|__builtin_(?:ia32|read|malloc|calloc|frame|return)\w*"
    r"|clock64|globaltimer\w*|clock(?=\s*\()"
    r"|_(?:GLIBC|LIBCPP|MSC_|WIN|LP64)\w*|(?:linux|unix|i386))\b"
)
# An #if around the include of a system header that NVRTC lacks, such as that of printf.
_INCLUDES = re.compile(
    r"(?m)^\s*#\s*if[^\n]*\n(?:\s*#\s*include\s*<[^>\n]*>[ \t]*\n)+\s*#\s*endif"
)


def told_apart(rendered: Rendered) -> str:
    """Return why a source is refused; empty if it does not test which compiler compiles it."""
    text = _INCLUDES.sub("", bare_text(rendered.source).replace("\\\n", ""))
    names = dict.fromkeys(_ASKS.findall(text))
    if not names:
        return ""
    return (
        f"the kernel asks who compiles it: {', '.join(names)}\n"
        "  the host run of a certificate has to be of the code that runs on a GPU\n"
        "  next: call the device library (kgen/primitives/), which has both kinds of code"
    )
