"""Print results as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kgen.measure.stats import Interval
from kgen.measure_check.bars import BarResult
from kgen.measure_check.model import ProblemQuality, SameKernel
from kgen.model.units import format_us


def print_problem(found: ProblemQuality) -> str:
    """Return the results of one problem as text."""
    lines = [f"{found.pass_name} {found.problem}", *_same(found.same), *_winners(found)]
    call = found.library
    lines += [
        f"  library call {format_us(call.library_us)} us, its kernel "
        f"{format_us(call.kernel_us)} us in the same comparison: {_interval(call.difference)}",
        f"    the kernel here over its tune's final: {_signed(call.kernel_over_final)}",
        f"    ({call.protocol})",
    ]
    return "\n".join(lines)


def print_bars(judged: Sequence[BarResult]) -> str:
    """Return one line per bar."""
    return "\n".join(_bar(v) for v in judged)


def _same(same: SameKernel) -> list[str]:
    pairs = sum(len(run.differences) for run in same.runs)
    lines = [
        f"  same kernel as {len(same.runs[0].medians_us)} contenders: {same.config}",
        f"    median |difference| {_share(same.difference.median)}"
        f"{_ends(same.difference)}, {pairs} pairs; runs differ by {_share(same.spread)}",
        "    bias by place " + "  ".join(map(_signed, same.biases)),
    ]
    for i, run in enumerate(same.runs, start=1):
        medians = "  ".join(f"{us:.4g}" for us in run.medians_us)
        differences = "  ".join(_interval(d) for d in run.differences)
        slowed = f"  slowed: {run.clocks['slowed']}" if "slowed" in run.clocks else ""
        lines.append(f"    run {i}: {medians} us; pairs {differences}{slowed}")
    # Different protocols of the contenders (for instance sample lengths) can explain a bias.
    ways = dict.fromkeys(p.rpartition(", median")[0] or p for p in same.runs[0].protocols)
    return [*lines, *(f"    ({way})" for way in ways)]


def _winners(found: ProblemQuality) -> list[str]:
    rate = found.flip_rate
    flips = "" if rate is None else f": {100 * rate:.0f} % of pairs disagree"
    lines = [f"  winners of {len(found.winners)} independent tunes{flips}"]
    for winner in found.winners:
        lines.append(
            f"    seed {winner.seed}: trial {format_us(winner.trial_us)} us, final "
            f"{format_us(winner.final_us)} us ({_signed(winner.final_over_trial)}), regret "
            f"{_interval(winner.regret)}  {winner.config}"
        )
    return lines


def _bar(v: BarResult) -> str:
    if v.worst is None or v.median is None:
        return f"  -       {v.name}: not measured"
    word = "kept  " if v.kept else "MISSED"
    return (
        f"  {word}  {v.name}: worst {_share(v.worst)} (bar {_share(v.bar)}), median "
        f"{_share(v.median)}; worst is {v.where}"
    )


def _share(value: float) -> str:
    return f"{100 * value:.2f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.2f} %"


def _interval(interval: Interval) -> str:
    return _signed(interval.median) + _ends(interval)


def _ends(interval: Interval) -> str:
    if not math.isfinite(interval.half_width):
        return " (too few for an interval)"
    return f" ({100 * interval.low:.2f} to {100 * interval.high:.2f})"
