"""Rows of a report under their short names, and the selection of rows by texts."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.errors import CatalogueError, ProblemError
from kgen.model.names import short_name
from kgen.model.problem import parse_problem
from kgen.model.signature import Signature
from kgen.report.model import Report
from kgen.report.tables import ReportRow, rows_of


def named_rows(report: Report, signature: Signature | None) -> list[ReportRow]:
    """All problems of a report, in its order, labelled with their short names.

    Args:
        report: The report.
        signature: The signature of the report's operator; None if the operator is not known here.
            The labels are then those of `rows_of`. The same holds for a problem of an older
            signature.
    """
    rows = rows_of(report)
    if signature is None:
        return rows
    return [_named(row, signature) for row in rows]


def _named(row: ReportRow, signature: Signature) -> ReportRow:
    try:
        name = short_name(parse_problem(row.report.problem, signature), signature)
    except ProblemError:
        return row
    return ReportRow(row.operator, row.gpu, name, row.report)


def select(
    rows: Sequence[ReportRow], pass_name: str | None, texts: Sequence[str]
) -> list[ReportRow]:
    """Return the rows of a pass that at least one of the texts names.

    Args:
        rows: The rows of any reports.
        pass_name: `forward` or `backward`; None for both.
        texts: Each text is a full key, a short name, some words of either (`bf16 +state`), or the
            identity of a winner's record. Without texts all rows are selected.
    Raises:
        CatalogueError: If there are rows, and none of them is selected.
    """
    found = [
        row for row in rows
        if pass_name in (None, row.report.pass_name)
        and (not texts or any(_is_named(row, text) for text in texts))
    ]
    if rows and not found:
        wanted = " ".join(filter(None, [pass_name, *(f"'{text}'" for text in texts)]))
        known = "\n    ".join(f"{r.operator} {r.report.pass_name} {r.label}" for r in rows[:8])
        more = f"\n    and {len(rows) - 8} more" if len(rows) > 8 else ""
        raise CatalogueError(f"no problem of the reports is {wanted}\n  known:\n    {known}{more}")
    return found


def _is_named(row: ReportRow, text: str) -> bool:
    if text == row.report.chosen.record:
        return True
    words = set(row.label.split()) | set(row.report.problem.split(","))
    return set(text.replace(",", " ").split()) <= words
