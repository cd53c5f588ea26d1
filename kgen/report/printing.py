"""A report as text for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kgen.model.record import COLD
from kgen.report.by_inputs import by_inputs
from kgen.report.details import environment_facts
from kgen.report.model import Environment, ProblemReport, Proof, Report

# Longer reasons and rules are cut; the report file has them in full.
_CUT = 88


def print_report(report: Report) -> str:
    """Return the report as aligned text: environments, one table per pass, trials, refusals."""
    parts = [f"{report.operator} on {report.gpu}"]
    parts += [_environment(environment) for environment in report.environments.values()]
    for pass_name in dict.fromkeys(p.pass_name for p in report.problems):
        problems = [p for p in report.problems if p.pass_name == pass_name]
        parts += ["", f"{pass_name}:", *_table(problems), ""]
        parts += [line for problem in problems for line in _details(problem)]
    if not report.problems:
        parts += ["", "no problems yet"]
    return "\n".join(parts).rstrip() + "\n"


def _environment(e: Environment) -> str:
    return "  " + ", ".join(environment_facts(replace(e, commit=e.commit[:10])))


def _table(problems: Sequence[ProblemReport]) -> list[str]:
    peers = list(dict.fromkeys(peer.name for p in problems for peer in p.peers))
    head = ["problem", "variant", "us", "quartiles", "of floor", *(f"vs {n}" for n in peers),
            "error", "bound"]
    rows = []
    for p in problems:
        timing = p.chosen.timing
        times = {peer.name: peer.timing.median_us for peer in p.peers}
        worst = max(p.accuracy, key=lambda a: a.error / a.bound if a.bound else 0.0, default=None)
        rows.append([
            p.problem, p.chosen.variant, f"{timing.median_us:.2f}",
            f"{timing.low_us:.2f}-{timing.high_us:.2f}", f"{100 * p.floor_share:.1f} %",
            *(f"{times[n] / timing.median_us:.2f}x" if n in times else "-" for n in peers),
            f"{worst.error:.1e}" if worst else "-", f"{worst.bound:.1e}" if worst else "-",
        ])
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [_line(cells, widths) for cells in (head, *rows)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A line of a table: two columns of text flush left, then numbers flush right."""
    padded = [cell.ljust(width) if index < 2 else cell.rjust(width)
              for index, (cell, width) in enumerate(zip(cells, widths, strict=True))]
    return "  " + "  ".join(padded).rstrip()


def _details(p: ProblemReport) -> list[str]:
    fates = ", ".join(f"{count} {fate}" for fate, count in p.trials.fates.items() if count)
    lines = [
        f"  {p.problem}",
        f"    chosen  {p.chosen.label}, record {p.chosen.record}",
        f"    space   {p.space.feasible} feasible of {p.space.size}",
        f"    trials  {p.trials.count} ({fates or 'none'}) in {p.trials.search_seconds:.1f} s, "
        f"compilers {p.trials.compile_seconds:.1f} s",
    ]
    lines += [f"    inputs  {who}: {times}" for who, times in _by_inputs(p)]
    for kernel in p.chosen.kernels:
        facts = [f"{kernel.threads} threads"]
        if kernel.registers is not None:
            facts.append(f"{kernel.registers} registers")
        if kernel.spill_bytes:
            facts.append(f"{kernel.spill_bytes} B spilled")
        static = kernel.smem_static_bytes or 0
        facts.append(f"shared memory {static} + {kernel.smem_dynamic_bytes} B")
        if kernel.occupancy is not None:
            facts.append(f"occupancy {100 * kernel.occupancy:.0f} %")
        lines.append(f"    kernel  {kernel.name}: {', '.join(facts)}")
    lines += [f"    remark  of the compiler, {remark}" for remark in p.chosen.remarks]
    for accuracy in p.accuracy:
        lines.append(f"    error   {accuracy.output}: {accuracy.error:.2e}, eager "
                     f"{accuracy.eager_error:.2e}, bound {accuracy.bound:.2e}")
    if p.evidence is not None:
        lines += _evidence(p.evidence)
    if p.runner_up is not None:
        second = p.runner_up
        values = ", ".join(f"{name}={value}" for name, value in second.config.items())
        lines.append(f"    second  {second.variant}({values}): {second.median_us:.2f} us, "
                     f"{second.ratio:.3f}x")
    if p.l2 != COLD:
        lines.append(f"    timed   with {p.l2} L2: {p.chosen.timing.protocol}")
    if p.slowed:
        lines.append(f"    suspect the GPU was slowed while it was timed: {p.slowed}")
    for reason, count in p.trials.reasons.items():
        lines.append(_cut(f"    refused {count} trials: {reason}"))
    for rule in p.space.refused:
        lines.append(_cut(f"    refused {rule.configs} configs: {rule.rule} ({rule.why})"))
    return lines


def _by_inputs(p: ProblemReport) -> list[tuple[str, str]]:
    """Contenders that were timed on several kinds of inputs, with these times as text."""
    timings = [("kgen", p.chosen.timing), *((peer.name, peer.timing) for peer in p.peers)]
    return [(name, times) for name, timing in timings if (times := by_inputs(timing))]


def _evidence(proof: Proof) -> list[str]:
    bits = "the same bits" if proof.same_bits else "each within the bound"
    lines = [f"    proof   {len(proof.inputs)} input sets x {proof.launches} launches, {bits}"]
    lines += [
        f"    host    {len(run.inputs)} input sets x {len(run.orders)} thread orders, "
        f"{run.compiler.split()[0]}"
        for run in proof.host
    ]
    if proof.host_missing:
        lines.append(_cut(f"    host    {proof.host_missing}"))
    return lines


def _cut(line: str) -> str:
    first = line.splitlines()[0] if line else ""
    return first if len(first) <= _CUT else f"{first[: _CUT - 3]}..."
