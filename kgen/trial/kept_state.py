"""Whether a kernel can keep something from one launch to the next outside its tensors.

A global variable lives as long as the loaded module. A kernel that counts its launches in one, say,
passes every proof and is wrong later. So kernels with global variables are refused, unless their
variant says why it has them (`keeps_state`). A cubin shows them all. A build for the host has no
symbols, so there the rendered source is looked through.
"""

from __future__ import annotations

import re

from kgen.model.artifact import Artifact, Rendered
from kgen.model.source_text import bare_text
from kgen.model.space import Variant
from kgen.runtime.cache import read_file
from kgen.runtime.code_digest import CubinError, globals_used

# A declaration up to the first character that tells a variable from a function.
_DECLARATION = re.compile(
    r"\b(?P<kind>static|thread_local|__device__|__managed__)\b(?P<rest>[^;{}()=\[]*)"
    r"(?P<end>[;{}()=\[])",
)
_HARMLESS = re.compile(r"\b(constexpr|const|__constant__|__shared__|KGEN_DEVICE|class|struct)\b")


def kept_state(rendered: Rendered, artifact: Artifact, variant: Variant) -> str:
    """Return why a build is refused; empty if it keeps nothing, or its variant says why it may.

    Args:
        rendered: Its source.
        artifact: The build.
        variant: The variant of the config.
    """
    if variant.keeps_state:
        return ""
    names = _in_cubin(artifact) if artifact.kind == "cubin" else ()
    names = names or variables_of(rendered.source)
    if not names:
        return ""
    # A kernel may name a variable so, too: the compiler's own is refused all the same.
    printed = " ($str: the text of a printf)" if "$str" in names else ""
    return (
        f"the kernel has global variables, which live from one launch to the next: "
        f"{', '.join(names)}{printed}\n"
        f"  next: use a workspace, or say why it may at {variant.where}: `keeps_state: ...`"
    )


def variables_of(source: str) -> tuple[str, ...]:
    """Return the names of variables in a CUDA source that outlive a launch.

    Those are `static`, `__device__` and `__managed__` variables that are neither constant nor
    shared. Functions and static assertions are told from them by what follows the name.
    """
    found = []
    for match in _DECLARATION.finditer(bare_text(source)):
        before = _statement_before(match)
        words = match["rest"]
        if match["end"] in "(}" or _HARMLESS.search(before + words):
            continue
        named = re.findall(r"[A-Za-z_]\w*", words)
        if named:
            found.append(named[-1])
    return tuple(dict.fromkeys(found))


def _statement_before(match: re.Match[str]) -> str:
    """The text of a statement that stands before a match: `constexpr` may come first."""
    before = match.string[: match.start()]
    start = max(before.rfind(end) for end in ";{}")
    return before[start + 1 :]


def _in_cubin(artifact: Artifact) -> tuple[str, ...]:
    try:
        return globals_used(read_file(artifact.path))
    except CubinError:
        return ()
