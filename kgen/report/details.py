"""One problem of a report as text: everything about its search and its finals."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.model.config import Config
from kgen.model.record import Timing
from kgen.model.units import format_us
from kgen.report.by_inputs import by_inputs
from kgen.report.model import Environment, ProblemReport
from kgen.report.searches import Search
from kgen.report.tables import ReportRow
from kgen.report.verdicts import is_tie, runner_up_is_tie

_RULES = 6  # rules shown: those that refused the most configs


def print_problem(
    row: ReportRow, search: Search, environment: Environment | None, options: str = ""
) -> str:
    """Return a problem with its final, its search, its refusals and the commands that repeat it.

    Args:
        row: The problem.
        search: Trials of the problem; may be empty.
        environment: Where the problem was measured; None if the report does not say.
        options: Further options of the commands that repeat the problem, such as ` --out DIR`.
    """
    entry = row.report
    lines = [f"{row.operator} {entry.pass_name} {row.label} on {row.gpu}", f"  {entry.problem}", ""]
    lines += _final(entry)
    lines += _search(entry, search)
    lines += ["", "  kernels"]
    for k in entry.chosen.kernels:
        occupancy = "" if k.occupancy is None else f", occupancy {100 * k.occupancy:.0f} %"
        registers = "" if k.registers is None else f", {k.registers} registers"
        lines.append(f"    {k.name}: {k.threads} threads{registers}, shared memory "
                     f"{k.smem_static_bytes or 0} + {k.smem_dynamic_bytes} B{occupancy}")
    lines += [f"    the compiler says: {remark}" for remark in entry.chosen.remarks]
    lines += ["", "  error against float64"]
    lines += [
        f"    {a.output}: {a.error:.2e}, eager PyTorch {a.eager_error:.2e}, allowed {a.bound:.2e}"
        for a in entry.accuracy
    ]
    lines += ["", "  evidence", *(f"    {line}" for line in evidence_lines(entry))]
    lines += ["", "  repeat", *(f"    {line}" for line in repeat_commands(row, options))]
    if environment is not None:
        lines += ["", "  measured on", f"    {', '.join(environment_facts(environment))}"]
    return "\n".join(lines) + "\n"


def _final(entry: ProblemReport) -> list[str]:
    timing, peers = entry.chosen.timing, entry.peers
    width = max(map(len, ["kgen", "runner-up", "floor", *(p.name for p in peers)]))
    lines = ["  final: winner and peers took turns in one run",
             f"    {'kgen':{width}}  {_spelled(timing)}  {entry.chosen.label}"]
    lines += _by_inputs(timing, width)
    if (second := entry.runner_up) is not None:
        tie = ", a tie" if runner_up_is_tie(entry) else ""
        lines.append(f"    {'runner-up':{width}}  {format_us(second.median_us):>8} us "
                     f"{second.ratio:.3f}x{tie}  "
                     f"{Config.of(second.variant, second.config).label}")
    for peer in entry.peers:
        ratio = peer.timing.median_us / timing.median_us
        tie = ", a tie" if is_tie(timing, peer.timing) else ""
        lines.append(f"    {peer.name:{width}}  {_spelled(peer.timing)}  {ratio:.2f}x{tie}")
        lines += _by_inputs(peer.timing, width)
    lines.append(f"    {'floor':{width}}  {format_us(entry.floor_us):>8} us, "
                 f"{100 * entry.floor_share:.1f} % reached")
    lines.append(f"    {timing.protocol}")
    if entry.slowed:
        lines.append(f"    suspect: the clocks were held down ({entry.slowed})")
    return lines


def _by_inputs(timing: Timing, width: int) -> list[str]:
    times = by_inputs(timing)
    return [f"    {'':{width}}  {times}"] if times else []


def _spelled(timing: Timing) -> str:
    return (f"{format_us(timing.median_us):>8} us "
            f"({format_us(timing.low_us)} to {format_us(timing.high_us)})")


def _search(entry: ProblemReport, search: Search) -> list[str]:
    fates = ", ".join(f"{n} {fate}" for fate, n in entry.trials.fates.items() if n)
    lines = ["", f"  search: {entry.trials.count} trials ({fates or 'none'}) in "
             f"{entry.trials.search_seconds:.1f} s, {entry.space.feasible} configs feasible of "
             f"{entry.space.size}"]
    if (best := search.best) is not None and best.timing is not None:
        lines.append(f"    best of the search, measured once: {format_us(best.timing.median_us)} us"
                     f"  {best.config.label}")
    lines += [f"    refused {n} trials: {why}" for why, n in entry.trials.reasons.items()]
    refused = sorted(entry.space.refused, key=lambda rule: -rule.configs)
    lines += [f"    ruled out {r.configs} configs: {r.why} ({r.where})" for r in refused[:_RULES]]
    if len(refused) > _RULES:
        lines.append(f"    {len(refused) - _RULES} more rules, each with its text: --full")
    return lines


def evidence_lines(entry: ProblemReport) -> list[str]:
    """The evidence that the winner is correct, as lines of text."""
    proof = entry.evidence
    if proof is None:
        return ["none recorded: the report is older than the field"]
    bits = "the same bits each time" if proof.same_bits else "each within the bound"
    lines = [f"on the device: {len(proof.inputs)} input sets x {proof.launches} launches, {bits}"]
    lines += [
        f"on the CPU: {len(run.inputs)} input sets x {len(run.orders)} thread orders, "
        f"{run.compiler}" for run in proof.host
    ]
    if proof.skipped:
        lines.append(f"input sets that the variant's guards do not admit: "
                     f"{', '.join(proof.skipped)}")
    if proof.host_missing:
        lines.append(proof.host_missing)
    return lines


def repeat_commands(row: ReportRow, options: str = "") -> list[str]:
    """Commands that certify and time a row again."""
    entry = row.report
    common = f"--op {row.operator} --gpu {row.gpu}{options}"
    one = f"--pass {entry.pass_name} --problem '{row.label}'"
    return [
        f"kgen verify {common} --record {entry.chosen.record}",
        f"kgen bench {common} {one}",
        f"kgen tune {common} {one}",
    ]


def environment_facts(e: Environment) -> Sequence[str]:
    """Device, versions, bandwidth and clocks."""
    facts = [e.device, f"driver {e.driver}" if e.driver else "",
             f"{e.compiler} {e.compiler_version}", f"torch {e.torch}", f"python {e.python}",
             f"kgen {e.kgen}" + (f" ({e.commit})" if e.commit else "")]
    if e.copy_gbps is not None:
        facts.append(f"copy {e.copy_gbps:.0f} GB/s")
    if e.sm_clock_mhz is not None:
        facts.append(f"SM {e.sm_clock_mhz:.0f} MHz")
    if e.memory_clock_mhz is not None:
        facts.append(f"memory {e.memory_clock_mhz:.0f} MHz")
    return [fact for fact in facts if fact]
