"""What a report says of the kernels of a config."""

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
        plan: Of the config.
        resources: By kernel, as the compiler reported them.
        occupancy: Of a launch with the resources of its kernel, 0..1; None: unknown.
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
