"""The entries of a report about the kernels of a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kgen.model.plan import Launch, Plan
from kgen.model.record import Resources
from kgen.report.model import KernelReport


def kernel_reports(
    plan: Plan,
    resources: Mapping[str, Resources],
    occupancy: Callable[[Launch, Resources | None], float | None],
) -> tuple[KernelReport, ...]:
    """Return an entry for each launch of a plan, in order.

    Args:
        plan: Plan of the config.
        resources: The compiler's resource report, by kernel.
        occupancy: Returns the occupancy of a launch with the resources of its kernel, 0 to 1, or
            None if it is unknown.
    """
    kernels = []
    for launch in plan.launches:
        used = resources.get(launch.kernel)
        kernels.append(
            KernelReport(
                name=launch.kernel,
                threads=launch.threads,
                registers=used.registers if used else None,
                spill_bytes=used.spill_bytes if used else None,
                smem_static_bytes=used.smem_bytes if used else None,
                smem_dynamic_bytes=launch.smem_bytes,
                occupancy=occupancy(launch, used),
            )
        )
    return tuple(kernels)
