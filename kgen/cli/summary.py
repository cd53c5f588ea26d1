"""The summary at the end of `kgen tune`; its first line is the file to open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kgen.model.names import short_name
from kgen.model.record import Timing
from kgen.model.units import format_us
from kgen.report.by_inputs import by_inputs
from kgen.report.verdicts import is_tie
from kgen.tune import PassPublished, PassResult, ProblemResult


def tune_summary(done: Sequence[PassPublished], warnings: Sequence[str]) -> str:
    """Return the summary of all passes of a tune.

    Args:
        done: The passes, at least one.
        warnings: Lines about variants of which no trial was verified.
    """
    published, request = done[-1].published, done[-1].result.request
    operator = request.entry.operator.name
    out = _out(published.library.root)
    lines = [f"open  {published.report_path}",
             f"      kgen report --op {operator} --gpu {request.gpu.name}{out}"
             "  (--html FILE for pictures)"]
    for one in done:
        lines += ["", *_pass(one.result)]
    if warnings:
        lines += ["", *(f"warning: {line}" for line in warnings)]
    root = published.library.root
    where = root if root.is_absolute() else f"./{root.name}"
    study = f"{request.study}  (optuna-dashboard {request.study})"
    if request.shared is not None and request.shared.url.scheme != "journal":
        study = request.shared.url.shown
    lines += ["", f"library  {root}  (pip install {where}; import kgen_ops)",
              f"trials   {request.journal}",
              f"study    {study}"]
    return "\n".join(lines)


def _out(root: Path) -> str:
    return "" if root == Path("generated") else f" --out {root}"


def _pass(result: PassResult) -> list[str]:
    request = result.request
    lines = [f"{request.entry.operator.name} {result.pass_name} on {request.gpu.name}: "
             f"{_count(len(result.results), 'problem')} tuned in {result.seconds:.0f} s"]
    for found in result.results:
        lines += _problem(found, short_name(found.problem, request.entry.operator.signature))
    if request.gpu.is_host:
        lines.append(
            "  (a CPU that runs each CUDA thread as a fiber: times for checking kernels, not speed)"
        )
    if result.worker_restarts:
        lines.append(f"  the worker was replaced {_count(result.worker_restarts, 'time')}; see "
                     "the reasons in the report")
    return lines


def _problem(found: ProblemResult, name: str) -> list[str]:
    ours = found.winner.timing
    facts = [f"{format_us(ours.median_us)} us",
             f"{100 * found.floor_us / ours.median_us:.0f} % of floor"]
    facts += [_beside(peer, ours, timing) for peer, timing in found.peers.items()]
    lines = [f"  {name}", f"    {', '.join(facts)}", f"    {found.winner.config.label}"]
    trials = f"{_count(sum(found.fates.values()), 'trial')} in {found.search_s:.1f} s"
    if times := by_inputs(ours):
        lines.append(f"    {times}")
    second = found.runner_up
    if second is not None and is_tie(ours, second.timing):
        trials += f"; a tie with {second.config.label}"
    lines.append(f"    {trials}")
    if found.timed_again:
        lines.append(f"    {_count(found.timed_again, 'earlier trial')} timed again, on trained "
                     "inputs, too")
    lines += [f"    {peer} failed: {why}" for peer, why in found.peer_errors.items()]
    lines += [f"    the compiler says of it: {text}" for text in found.winner.artifact.remarks]
    if slowed := found.clocks.get("slowed"):
        lines += [
            f"    suspect: the GPU was slowed ({slowed}) while the finalists were timed, twice",
            "    let it cool, or stop what shares its power, and tune again",
        ]
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _beside(name: str, ours: Timing, theirs: Timing) -> str:
    if is_tie(ours, theirs):
        return f"a tie with {name}"
    ratio = theirs.median_us / ours.median_us
    return f"{ratio:.2f} x {name}" if ratio >= 0.1 else f"{ratio:.1g} x {name}"
