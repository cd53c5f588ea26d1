"""The states of rows, safe kernels and GPUs that an emission adds to a library."""

from __future__ import annotations

from collections.abc import Mapping

from kgen.emit.binding import absent_literals, bound_plan, literals
from kgen.emit.state import (
    LEARNT,
    PREDICTED,
    TUNED,
    GpuState,
    RowState,
    SafeState,
)
from kgen.emit.values import SafeKernel, Winner
from kgen.errors import RecordError
from kgen.model.gpu import GpuProfile


def gpu_state(gpu: GpuProfile) -> GpuState:
    """The state of a GPU."""
    return GpuState(gpu.name, gpu.title, gpu.device_names, gpu.arch, tuple(gpu.names.items()))


def row_state(winner: Winner) -> RowState:
    """The state of a row.

    Raises:
        RecordError: If the winner's record has no timing.
    """
    passed = winner.operator.signature.pass_named(winner.pass_name)
    timing = winner.record.timing
    if timing is None:
        raise RecordError(
            f"{winner.operator.name} {winner.problem}: record {winner.record.id} "
            f"({winner.record.fate}) has no timing, so its config cannot be a winner"
        )
    constants = {name: winner.problem.dim(name) for name in winner.variant.constants}
    dtypes = dict(winner.problem.dtypes)
    config = winner.variant.values(winner.config)
    fixed = literals(constants, dtypes, config, winner.gpu.names)
    fixed |= absent_literals(passed, dtypes)
    return RowState(
        pass_name=winner.pass_name,
        dims=winner.problem.dims,
        dtypes=winner.problem.dtypes,
        variant=winner.config.variant,
        config=winner.config.values,
        constants=winner.variant.constants,
        kernel=winner.rendered.digest,
        record=winner.record.id,
        median_us=round(timing.median_us, 3),
        plan=bound_plan(winner.variant, passed, fixed),
        origin=_origin(winner),
        code=winner.record.code,
    )


def _origin(winner: Winner) -> str:
    if winner.predicted:
        return PREDICTED
    return TUNED if winner.searched else LEARNT


_Pairs = tuple[tuple[str, str], ...]


def safe_state(
    safe: SafeKernel, proven: Mapping[tuple[str, _Pairs, str], _Pairs]
) -> SafeState:
    """The state of a safe kernel.

    Args:
        safe: The kernel.
        proven: Code digests in the library by pass, dtypes and kernel. A certificate for another
            architecture stays valid as long as the kernel's text is the same.
    """
    passed = safe.operator.signature.pass_named(safe.pass_name)
    fixed = literals({}, safe.dtypes, safe.variant.values(safe.config), {})
    fixed |= absent_literals(passed, safe.dtypes)
    plan = bound_plan(safe.variant, passed, fixed)
    earlier = proven.get((safe.pass_name, tuple(safe.dtypes.items()), safe.rendered.digest), ())
    return SafeState(
        pass_name=safe.pass_name,
        dtypes=tuple(safe.dtypes.items()),
        variant=safe.config.variant,
        config=safe.config.values,
        kernel=safe.rendered.digest,
        # A safe kernel has no conditions.
        plan=type(plan)(plan.launches, plan.workspaces),
        code=tuple(sorted({**dict(earlier), **dict(safe.code)}.items())),
    )
