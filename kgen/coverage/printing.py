"""A coverage as text for terminals."""

from __future__ import annotations

from kgen.coverage.model import CoverageReport, CoveredProblem, Spread
from kgen.model.names import short_name
from kgen.model.problem import parse_problem
from kgen.model.record import RANDOM, TRAINED
from kgen.model.signature import Signature
from kgen.model.units import format_us

_STEPS = ("exact", "learnt", "nearest", "family", "safe", "none")


def print_problem(found: CoveredProblem, signature: Signature) -> str:
    """One problem on a line: step, times, ratio, loss."""
    name = short_name(parse_problem(found.problem, signature), signature)
    facts = [found.step]
    if found.kernel_us is not None:
        facts.append(f"{format_us(found.kernel_us)} us")
    if found.other_us is not None:
        other = RANDOM if found.inputs == TRAINED else TRAINED
        facts[-1] += f" on {found.inputs} inputs ({format_us(found.other_us)} us on {other} ones)"
    if found.floor_us is not None and found.kernel_us:
        facts.append(f"{100 * found.floor_us / found.kernel_us:.0f} % of floor")
    if found.call_us is not None:
        facts.append(f"call {format_us(found.call_us)} us")
    if found.ratio is not None:
        facts.append(f"{found.peer} / kgen {found.ratio:.2f}")
    if found.first_ms is not None:
        facts.append(f"first call {found.first_ms:.3g} ms")
    if found.loss is not None:
        facts.append(f"loss {100 * found.loss:.1f} %")
    if found.failed:
        facts.append(f"NOT TIMED: {found.failed}")
    return f"{found.pass_name} {name}: {', '.join(facts)}"


def print_coverage(report: CoverageReport) -> str:
    """A table for each pass: problems by step, ratios to the fastest peers, losses."""
    lines = [f"{report.operator} on {report.gpu}, {', '.join(report.populations)}"]
    for name in dict.fromkeys(p.pass_name for p in report.problems):
        steps = report.steps(name)
        counted = ", ".join(f"{step} {steps[step]}" for step in _STEPS if steps[step])
        lines.append(f"  {name}: {steps.total()} problems: {counted}")
        if (ratios := report.ratios(name)) is not None:
            lines.append(f"    fastest peer / kgen over {ratios.count}: geometric mean "
                         f"{ratios.mean:.2f}, tenth percentile {ratios.tail:.2f}, worst "
                         f"{ratios.worst:.2f}")
        if (losses := report.losses(name)) is not None:
            lines.append(f"    loss against a search of the very problem, over {losses.count}: "
                         + _percents(losses))
        failed = sum(1 for p in report.problems if p.pass_name == name and p.failed)
        if failed:
            lines.append(f"    {failed} could not be timed; their lines say why")
    return "\n".join(lines)


def _percents(losses: Spread) -> str:
    return (f"mean {100 * losses.mean:.1f} %, ninetieth percentile {100 * losses.tail:.1f} %, "
            f"worst {100 * losses.worst:.1f} %")
