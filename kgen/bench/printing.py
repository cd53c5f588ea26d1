"""Bench results as text for terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kgen.bench.results import (
    CallTable,
    LadderResult,
    LadderStepResult,
    PeerComparison,
    PeerTime,
    Profile,
)
from kgen.model.record import OutputAccuracy, Timing
from kgen.report.by_inputs import by_inputs

_NAME_COLUMNS = 40


def print_comparison(contest: PeerComparison) -> str:
    """Return one problem as a table: kgen's kernel, then the peers in the operator's order."""
    kernel = contest.kernel
    rows = [
        ["", "time", "quartiles", "over kgen", "95 % interval", "of floor"],
        [f"kgen, {contest.origin}", *_times(kernel.timing), "1", "", _percent(kernel.floor_share)],
    ]
    rows += [
        [p.name, *_times(p.timing), f"{p.ratio:.3f}", _interval(p), _percent(p.floor_share)]
        for p in contest.peers
    ]
    lines = [_title(contest.pass_name, contest.problem, contest.floor_us), f"  {kernel.label}"]
    if contest.remark:
        lines += [f"  {line}" for line in contest.remark.splitlines()]
    lines += _aligned(rows, flush_left=1)
    lines += [f"  {name} did not run: {why}" for name, why in contest.failed.items()]
    lines += [f"  {_error(a, contest.peers)}" for a in kernel.accuracy]
    timings = [("kgen", kernel.timing), *((p.name, p.timing) for p in contest.peers)]
    lines += [f"  {name}: {times}" for name, timing in timings if (times := by_inputs(timing))]
    lines += [f"  {kernel.timing.protocol}", *_throttled(contest.clocks)]
    return "\n".join(lines) + "\n"


def print_ladder(climb: LadderResult) -> str:
    """Return one ladder as a table in published order."""
    rows = [["step", "kernel", "time", "of floor", "speed-up", "published"]]
    for rung in climb.rungs:
        if rung.timing is None:
            rows.append([rung.step, rung.label, "refused", "", "", rung.published])
        else:
            faster = "-" if rung.speed_up is None else f"{rung.speed_up:.2f} x"
            reached = _percent(rung.floor_share or 0.0)
            cells = [spell_us(rung.timing.median_us), reached, faster, rung.published]
            rows.append([rung.step, rung.label, *cells])
    lines = [_title(climb.pass_name, climb.problem, climb.floor_us)]
    lines += _aligned(rows, flush_left=2)
    lines += [f"  {rung.step}: {text}" for rung in climb.rungs if (text := _remark(rung))]
    timed = [rung.timing for rung in climb.rungs if rung.timing is not None]
    lines += [
        f"  {rung.step}: {times}"
        for rung in climb.rungs
        if rung.timing is not None and (times := by_inputs(rung.timing))
    ]
    lines += [f"  {timing.protocol}" for timing in timed[:1]]
    lines += _throttled(climb.clocks)
    return "\n".join(lines) + "\n"


def print_profile(profile: Profile) -> str:
    """Return one profile as a table, in the order of the trace."""
    what = "kernel" if profile.on_gpu else "operator"
    rows = [["", f"largest {what}", "end to end", f"all {what}s", f"{what}s", "largest"]]
    for found in profile.contenders:
        times = (found.end_to_end_us, found.busy_us, found.largest_us)
        whole, busy, largest = (spell_us(us) for us in times)
        count = f"{found.kernels:.4g}"
        rows.append([found.name, _shortened(found.largest) or "-", whole, busy, count, largest])
    lines = [f"{profile.pass_name} {profile.problem}", f"  {profile.label}"]
    if profile.remark:
        lines += [f"  {line}" for line in profile.remark.splitlines()]
    lines += _aligned(rows, flush_left=2)
    lines += [f"  {name} did not run: {why}" for name, why in profile.failed.items()]
    lines.append(f"  trace: {profile.trace}")
    return "\n".join(lines) + "\n"


def print_calls(table: CallTable) -> str:
    """Return the host cost of calls as a table, the library's function first."""
    ours = table.costs[0]
    rows = [["", "host time", "quartiles", f"over {ours.name}", "until done"]]
    for cost in table.costs:
        quartiles = f"{spell_us(cost.low_us)} - {spell_us(cost.high_us)}"
        ratio = cost.median_us / ours.median_us
        done = spell_us(cost.done_us)
        rows.append([cost.name, spell_us(cost.median_us), quartiles, f"{ratio:.2f}", done])
    lines = [f"{table.pass_name} {table.problem}, a call without gradients"]
    lines += _aligned(rows, flush_left=1)
    lines += [f"  {name} did not run: {why}" for name, why in table.failed.items()]
    lines.append(f"  first call of {ours.name}: {table.first_ms:.3g} ms")
    least, most = min(c.calls for c in table.costs), max(c.calls for c in table.costs)
    each = str(most) if least == most else f"{least} to {most}"
    lines.append(
        f"  {table.launcher} launcher, host clock, interleaved over {ours.rounds} rounds of {each} "
        "calls"
    )
    return "\n".join(lines) + "\n"


def _shortened(name: str) -> str:
    """The beginning of a kernel's name, because names of C++ templates are long."""
    return name if len(name) <= _NAME_COLUMNS else f"{name[: _NAME_COLUMNS - 3]}..."


def spell_us(us: float) -> str:
    """`987 us`, `1.98 ms`."""
    return f"{us:.4g} us" if us < 1000 else f"{us / 1000:.4g} ms"


def _title(pass_name: str, problem: str, floor_us: float) -> str:
    return f"{pass_name} {problem}, floor {spell_us(floor_us)}"


def _times(timing: Timing) -> tuple[str, str]:
    return spell_us(timing.median_us), f"{spell_us(timing.low_us)} - {spell_us(timing.high_us)}"


def _interval(peer: PeerTime) -> str:
    if peer.ratio_low is None or peer.ratio_high is None:
        return "too few rounds"
    return f"{peer.ratio_low:.3f} - {peer.ratio_high:.3f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _error(accuracy: OutputAccuracy, peers: Sequence[PeerTime]) -> str:
    """The kernel's error, and the errors of peers that compute this output."""
    errors = [f"{p.name} {a.error:.2e}" for p in peers for a in p.accuracy
              if a.output == accuracy.output]
    return f"error of {accuracy.output}: " + ", ".join(
        [f"kgen {accuracy.error:.2e}", *errors, f"bound {accuracy.bound:.2e}"]
    )


def _remark(rung: LadderStepResult) -> str:
    return f"refused: {rung.refused}" if rung.refused else rung.note


def _throttled(clocks: Mapping[str, str]) -> list[str]:
    held = clocks.get("throttle", "none")
    return [] if held == "none" else [f"  the clocks were reduced: {held}"]


def _aligned(rows: Sequence[Sequence[str]], flush_left: int) -> list[str]:
    """Align a table: the first `flush_left` columns are text, the others numbers, flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < flush_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines
