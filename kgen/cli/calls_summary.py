"""The last lines of `kgen tune --calls`: the time that the captured calls save."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.model.captured import CapturedCall, CapturedCalls
from kgen.model.gpu import GpuProfile
from kgen.model.names import short_name
from kgen.model.units import format_us
from kgen.tune import PassResult


def calls_summary(captured: CapturedCalls, done: Sequence[PassResult]) -> str:
    """Return a table of captured and tuned times, and what a step of the model saves.

    Args:
        captured: The file of calls.
        done: The passes that were tuned for it.
    """
    tuned_us: dict[tuple[str, str, str], float] = {}
    gpus: set[GpuProfile] = set()
    signatures = {}
    for result in done:
        operator = result.request.entry.operator
        gpus.add(result.request.gpu)
        signatures[operator.name] = operator.signature
        for found in result.results:
            key = (operator.name, result.pass_name, str(found.problem))
            tuned_us[key] = found.winner.timing.median_us
    lines = [f"{captured.name}: {_steps(captured.steps)} captured"]
    before = after = 0.0
    not_compared: list[str] = []
    for call in captured.calls:
        key = (call.operator, call.pass_name, str(call.problem))
        if key not in tuned_us:
            continue
        name = f"{call.operator} {call.pass_name} " + short_name(
            call.problem, signatures[call.operator])
        if (why := _not_comparable(call, gpus)) is not None:
            not_compared.append(f"  {name}: {call.calls} calls; {why}")
            continue
        assert call.median_us is not None  # else `_not_comparable` returned a reason
        ours = tuned_us[key]
        before += call.calls * call.median_us
        # A tuned row that looks slower than the kernel that serves the call today counts as equally
        # fast: the difference comes from how the two were timed.
        after += call.calls * min(ours, call.median_us)
        lines += [f"  {name}",
                  f"    {call.calls} calls by {call.step} of {format_us(call.median_us)} us, tuned "
                  f"{format_us(ours)} us"]
    lines += not_compared
    if before:
        steps = captured.steps
        lines += [
            f"  together {format_us(before / steps)} us a step before, "
            f"{format_us(after / steps)} us tuned: "
            f"{format_us((before - after) / steps)} us a step saved",
            "  captured times are of the model's own run, where L2 may hold the inputs and a short "
            "kernel may",
            "  wait for the host; tuned times are of the kernel alone",
        ]
    return "\n".join(lines)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _not_comparable(call: CapturedCall, gpus: set[GpuProfile]) -> str | None:
    if call.median_us is None:
        return "none was timed, as each problem's first call is not"
    if call.device == "cpu":
        here = any(gpu.is_host for gpu in gpus)
    else:
        here = any(call.device in gpu.device_names for gpu in gpus)
    return None if here else f"captured on {call.device}, so not compared"
