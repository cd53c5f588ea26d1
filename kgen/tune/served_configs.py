"""The configs that a library runs now for the problems of a tune."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kgen.catalogue import Entry
from kgen.emit import LoadedLibrary
from kgen.errors import KgenError
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.search.declared import as_declared


def served_configs(
    out: Path, entry: Entry, problems: Mapping[str, Sequence[Problem]], gpu: GpuProfile
) -> dict[tuple[str, str], Config]:
    """Ask the library of a folder which config it runs for each problem.

    A tune tries these first, so that even a search of a few trials has timed the current kernel.

    Args:
        out: The folder; it may have no library, or a damaged one, which a tune replaces.
        entry: The operator.
        problems: The problems by pass.
        gpu: The GPU to tune for.
    Returns:
        The configs by pass and problem, without those of the safe variant, which a search tries
        last. Empty for the host, and where the library cannot be asked.
    """
    found: dict[tuple[str, str], Config] = {}
    if gpu.is_host:
        return found
    with suppress(KgenError), LoadedLibrary.open(out, "--out") as library:
        for name, asked in problems.items():
            for problem in asked:
                served = library.served(entry.operator.name, name, problem, gpu)
                if served is None or served.step == "safe":
                    continue
                if (config := as_declared(entry, name, served.config)) is not None:
                    found[name, str(problem)] = config
    return found
