"""A report as a screen of text: a summary per pass, then a line per problem."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kgen.model.record import COLD
from kgen.model.units import format_us
from kgen.report.model import Report
from kgen.report.tables import ReportRow
from kgen.report.verdicts import Tally, spell_standing

HOST = "host"
_LINES = 16  # of rows shown of a pass; both passes of an operator fit on a screen
_NAME = 36


def print_brief(report: Report, rows: Sequence[ReportRow], whole: bool = False) -> str:
    """Return a screen of one operator on one GPU.

    Args:
        report: The report, whose environments are shown.
        rows: All rows of the report, or some of them, under their short names.
        whole: Whether to show every row. Otherwise a pass with many rows shows the rows with the
            least lead over the fastest peer.
    """
    devices = dict.fromkeys(
        f"{e.device}, {e.compiler} {e.compiler_version}, torch {e.torch}"
        for e in report.environments.values()
    )
    lines = [f"{report.operator} on {report.gpu} ({'; '.join(devices)})"]
    if report.gpu == HOST:
        lines.append("  (a CPU runs each CUDA thread as a fiber: times say nothing of a GPU's)")
    for pass_name in dict.fromkeys(row.report.pass_name for row in rows):
        lines += ["", *_pass(report, pass_name, rows, whole)]
    if not rows:
        lines += ["  no problems yet"]
    return "\n".join(lines) + "\n"


def _pass(report: Report, pass_name: str, all_rows: Sequence[ReportRow], whole: bool) -> list[str]:
    rows = [row for row in all_rows if row.report.pass_name == pass_name]
    shown = rows
    if not whole:
        by_lead = sorted(rows, key=lambda row: row.ratio or 0.0)
        ends = itertools.accumulate(1 + (len(row.label) > _NAME) for row in by_lead)
        chosen = [row for row, end in zip(by_lead, ends, strict=True) if end <= _LINES]
        shown = [row for row in rows if row in chosen]
    lines = [f"{pass_name}: {Tally.of(rows)}"]
    width = min(_NAME, max(len(name) for name in ("problem", *(row.label for row in shown))))
    lines.append(f"  {'problem':{width}}  {'us':>8}  {'of floor':>8}  fastest peer / kgen")
    lines += [_line(row, width) for row in shown]
    if left := len(rows) - len(shown):
        lines.append(f"  {left} more lead by more: kgen report --op {report.operator} "
                     f"--pass {pass_name}")
    return lines


def _line(row: ReportRow, width: int) -> str:
    """The text of one problem; a name that is too long gets a line of its own."""
    entry = row.report
    share = f"{100 * entry.floor_share:.0f} %"
    facts = f"{format_us(row.kgen_us):>8}  {share:>8}  {spell_standing(row)}"
    facts += "  !" if entry.slowed or entry.l2 != COLD else ""
    if len(row.label) > width:
        return f"  {row.label}\n  {'':{width}}  {facts}"
    return f"  {row.label:{width}}  {facts}"


def explain_brief() -> str:
    """The legend of the columns, printed once below all screens."""
    return (
        "us: median of the final, in which winner and peers took turns. of floor: least\n"
        "possible time over us. tie: the quartiles of kgen and the fastest peer overlap.\n"
        "mean: geometric mean of fastest peer over kgen. !: the clocks were held down, or\n"
        "L2 was warm. All of a problem: kgen report --op OP --problem 'NAME'. All: --full\n"
    )
