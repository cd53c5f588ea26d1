"""Parse the report of `ptxas -v` from the output of nvcc or the log of NVRTC."""

from __future__ import annotations

import re

from kgen.model.record import Resources

# The line with the stack frame follows the line that names the function. nvcc indents it by blanks,
# NVRTC by "ptxas         .     ".
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
_CUMULATIVE = re.compile(r"(\d+) bytes cumulative stack size")
# `(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...`
_REMARK = re.compile(r"\((C\d{4})\) Potential Performance Loss: (.+)")


def parse_resources(log: str) -> tuple[tuple[str, Resources], ...]:
    """Return (kernel, resources) of each kernel in a `ptxas -v` log, sorted by name.

    ptxas reports a function that was not inlined separately. The cumulative stack size of a caller
    includes the function's frame; its spills are not counted. Functions of kgen's device library
    are always inlined.
    """
    entries: dict[str, dict[str, int]] = {}
    entry = owner = ""
    for line in log.splitlines():
        if found := _ENTRY.search(line):
            entry = found.group(1)
            entries[entry] = {"registers": 0, "spill": 0, "stack": 0, "smem": 0}
        elif found := _PROPERTIES.search(line):
            owner = found.group(1)
        elif found := _FRAME.search(line):
            if owner in entries:
                stack, stores, loads = map(int, found.groups())
                facts = entries[owner]
                facts["stack"] = max(facts["stack"], stack)
                facts["spill"] = stores + loads
        elif (found := _USED.search(line)) and entry in entries:
            facts = entries[entry]
            facts["registers"] = int(found.group(1))
            if smem := _SMEM.search(line):
                facts["smem"] = int(smem.group(1))
            if cumulative := _CUMULATIVE.search(line):
                facts["stack"] = max(facts["stack"], int(cumulative.group(1)))
    return tuple(
        (name, Resources(f["registers"], f["spill"], f["stack"], f["smem"]))
        for name, f in sorted(entries.items())
    )


def parse_remarks(log: str) -> tuple[str, ...]:
    """Return the performance remarks of ptxas, each once: `C7512: wgmma.mma_async ...`.

    A kernel with a remark compiles and is correct, so nobody would read its compiler log.
    """
    return tuple(dict.fromkeys(f"{code}: {text.strip()}" for code, text in _REMARK.findall(log)))
