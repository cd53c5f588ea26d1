"""The kernels that dispatch would compile for a population's problems, compiled ahead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kgen.catalogue import load_profiles
from kgen.emit import LoadedLibrary
from kgen.model.population import PopulationProblem
from kgen.package.cubins import KernelSource, check_arch


def family_kernels(
    library: Path, problems: Sequence[PopulationProblem], arch: str
) -> tuple[KernelSource, ...]:
    """Render the kernels that the library would render at the first calls of these problems.

    The config that a family chooses depends on the GPU's facts, so the kernels are rendered for
    each known GPU of the architecture. Problems that a row or the safe kernel serves add nothing.

    Args:
        library: Folder that holds `kgen_ops`.
        problems: The problems of one or more operators.
        arch: `sm_80`, `sm_90a`.
    Raises:
        CatalogueError: If there is no library.
        ProblemError: If the library does not have an operator.
    """
    capability = check_arch(arch)
    profiles = [p for p in load_profiles().values()
                if p.arch != "host" and p.compute_capability == capability]
    found: dict[tuple[str, str], KernelSource] = {}
    with LoadedLibrary.open(library, "--from") as loaded:
        for entry in problems:
            for profile in profiles:
                served = loaded.served(entry.operator, entry.pass_name, entry.problem, profile)
                if served is None or served.step != "family":
                    continue
                stem, text = loaded.rendered(
                    entry.operator, entry.pass_name, entry.problem, served.config)
                found[entry.operator, stem] = KernelSource(entry.operator, stem, text)
    return tuple(kernel for _, kernel in sorted(found.items()))
