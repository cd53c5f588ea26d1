"""Pictures and the page with figures, drawn from the committed reports."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kgen.cli.main import main as kgen
from kgen.report import draw_svg, load_report

FOLDER = "pictures"
REPORT_FILE = "kgen-report.html"  # beside the pages; report.html is the page that shows it
_REPORT = re.compile(r"## (?P<operator>\w+) on (?P<gpu>\S+)")
_PASS = re.compile(r"### (?P<operator>\w+) (?P<pass>forward|backward)")


def pictures(library: Path) -> dict[str, str]:
    """`<operator>-<gpu>-<pass>` -> a picture (SVG) of all its problems.

    Args:
        library: The folder of `kgen_ops`.
    """
    found = {}
    for path in sorted(library.glob("*/reports/*.yaml")):
        report = load_report(path)
        for name in dict.fromkeys(problem.pass_name for problem in report.problems):
            chosen = tuple(p for p in report.problems if p.pass_name == name)
            found[f"{report.operator}-{report.gpu}-{name}"] = draw_svg(
                [replace(report, problems=chosen)], with_unpaired=True)
    return found


def with_pictures(page: str, drawn: Iterable[str]) -> str:
    """Put each picture below the heading of its pass in the results page.

    Raises:
        ValueError: If the page has no place for a picture: its headings have another form.
    """
    lines, gpu, left = [], "", set(drawn)
    for line in page.splitlines():
        lines.append(line)
        if report := _REPORT.fullmatch(line):
            gpu = report["gpu"]
        elif (pass_ := _PASS.fullmatch(line)) and (
            (name := f"{pass_['operator']}-{gpu}-{pass_['pass']}") in left
        ):
            left.remove(name)
            told = f"Times of {pass_['operator']} {pass_['pass']} on {gpu}, as in the table below"
            lines += ["", f"![{told}]({FOLDER}/{name}.svg)"]
    if left:
        raise ValueError(f"docs/results.md has no heading for {', '.join(sorted(left))}")
    return "\n".join(lines) + "\n"


def write_report(generated: Path, folder: Path) -> None:
    """Write the page with figures of `kgen report --html`."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):  # the path is of no use to who builds the site
        status = kgen(["report", "--out", str(generated), "--html", str(folder / REPORT_FILE)])
    if status != 0:
        raise SystemExit("kgen report --html failed")


def report_page() -> str:
    """The page that leads to it, and shows it."""
    return (
        "# Report\n\n"
        "All committed reports with figures: times beside peers and floor, rooflines, coverage, "
        "searches, evidence and the source of each winning kernel. It is one file that needs no "
        f"network, written by `kgen report --html`. The tables are in [results](results.md).\n\n"
        f'<p><a href="{REPORT_FILE}">Open the report in a window of its own</a></p>\n'
        f'<iframe class="report" src="{REPORT_FILE}" title="Report" loading="lazy"></iframe>\n'
    )
