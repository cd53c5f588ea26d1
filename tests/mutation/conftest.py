"""Print the table of docs/verification.md after the run, for the mutants that were run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

Row = tuple[str, str, str]  # operator, fate, mechanism or empty


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: list[Row] = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "mutant"
    ]
    if not rows:
        return
    from mutation_table import table  # importable once the tests in this folder are collected

    terminalreporter.write_sep("=", "mutants of kernels")
    terminalreporter.write_line(table([(str(a), str(b), str(c)) for a, b, c in rows]))
