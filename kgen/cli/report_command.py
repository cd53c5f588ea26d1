"""`kgen report`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kgen.catalogue import Catalogue, open_catalogue
from kgen.cli.context import LIBRARY, folder_options
from kgen.cli.predictions import printed_predictions
from kgen.coverage import load_coverage, population_map
from kgen.errors import CatalogueError, OptionError, RecordError, suggest
from kgen.model.signature import Signature
from kgen.operators.base import Operator
from kgen.report import (
    Environment,
    Report,
    ReportRow,
    Search,
    draw_svg,
    insert_summary,
    load_report,
    print_markdown,
    print_report,
    write_whole,
)
from kgen.report.brief import explain_brief, print_brief
from kgen.report.compared import Pair, compare_rows, is_comparable, print_pairs
from kgen.report.details import print_problem
from kgen.report.exchange import write_exchange
from kgen.report.flat import flat_row, to_csv, to_json
from kgen.report.names import named_rows, select
from kgen.report.page import render_html
from kgen.report.page_data import Shown
from kgen.report.population_map import PopulationMap
from kgen.report.searches import load_searches, search_of
from kgen.report.studies import StudyOf, write_studies


@dataclass(frozen=True)
class Chosen:
    """A report with the rows that the options select.

    Attributes:
        path: File of the report.
        report: The whole report.
        rows: Selected rows under their short names.
        operator: Declaration of the report's operator; None if kgen does not know the operator.
    """

    path: Path
    report: Report
    rows: Sequence[ReportRow]
    operator: Operator | None

    @property
    def signature(self) -> Signature | None:
        """The operator's signature; None if kgen does not know the operator."""
        return None if self.operator is None else self.operator.signature

    @property
    def folder(self) -> Path:
        """The operator's folder in the library."""
        return self.path.parent.parent

    @property
    def selected(self) -> Report:
        """The report without the rows that are not selected."""
        return replace(self.report, problems=tuple(row.report for row in self.rows))

    def searches(self) -> Mapping[tuple[str, str], Search]:
        """The trials in the journal beside the report."""
        return load_searches(self.path)


def run(options: argparse.Namespace) -> int:
    """Print the selected problems of the reports under the output folder, or write them.

    Raises:
        CatalogueError: If nothing is selected.
        OptionError: If options contradict each other.
        RecordError: If a report or the file of `--summary` does not have the documented format.
        StorageError: If a file cannot be written.
    """
    _check(options)
    catalogue = open_catalogue(options.path)
    predicted = printed_predictions(options, catalogue)
    try:
        reports = _chosen(options, catalogue)
    except CatalogueError:
        if not predicted:
            raise
        reports = []  # nothing is measured yet
    if written := _write(options, reports, catalogue):
        print(f"wrote {', '.join(written)}")
    elif options.against:
        _print_against(options, reports)
    elif options.csv or options.json:
        _print_flat(options, reports)
    elif options.full:
        print("\n".join(print_report(chosen.selected) for chosen in reports), end="")
    elif options.problem:
        print("\n".join(_problems(chosen, _folders(options)) for chosen in reports), end="")
    else:
        whole = bool(options.op or options.pass_name)
        screens = [print_brief(chosen.report, chosen.rows, whole) for chosen in reports]
        print("\n".join([*screens, *([explain_brief()] if reports else [])]), end="")
    if predicted:
        print(("\n" if reports else "") + predicted, end="")
    return 0


_PRINTED = ("full", "csv", "json", "against")
_WRITTEN = ("markdown", "svg", "summary", "html", "optuna", "t4")


def _check(options: argparse.Namespace) -> None:
    """Refuse combinations of options in which one option would be ignored.

    Raises:
        OptionError: If there is such a combination.
    """
    if options.coverage and not options.html:
        raise OptionError("--coverage is drawn on the page of --html; add --html FILE")
    written = {name: getattr(options, name) for name in _WRITTEN if getattr(options, name)}
    for name in _PRINTED:
        if not getattr(options, name) or (name == "against" and "html" in written):
            continue
        if written:
            raise OptionError(
                f"--{name} prints, --{next(iter(written))} writes instead of printing\n"
                "  next: run kgen report once for each"
            )
    files = [Path(path).resolve() for path in written.values()]
    if len(set(files)) < len(files):
        raise OptionError(
            f"{' and '.join(f'--{name} {path}' for name, path in written.items())}: "
            "each needs a file of its own"
        )


def _chosen(options: argparse.Namespace, catalogue: Catalogue) -> list[Chosen]:
    library = Path(options.out) / LIBRARY
    files = sorted(library.glob("*/reports/*.yaml"))
    paths = [
        f
        for f in files
        if options.op in (None, f.parent.parent.name) and options.gpu in (None, f.stem)
    ]
    if not paths:
        known = [f"{f.parent.parent.name} on {f.stem}" for f in files]
        raise CatalogueError(
            f"no report of {_quoted(options.op, 'any operator')} on "
            f"{_quoted(options.gpu, 'any GPU')} under {library}\n  {suggest('', known)}\n"
            "  kgen tune writes them"
        )
    found = []
    for path in paths:
        report = load_report(path)
        is_known = report.operator in catalogue.names
        operator = catalogue.operator(report.operator) if is_known else None
        signature = None if operator is None else operator.signature
        found.append(Chosen(path, report, named_rows(report, signature), operator))
    if options.pass_name is None and not options.problem:
        return found
    every = [row for chosen in found for row in chosen.rows]
    rows = select(every, options.pass_name, options.problem)
    kept = [replace(c, rows=[row for row in c.rows if row in rows]) for c in found]
    return [chosen for chosen in kept if chosen.rows]


def _quoted(name: str | None, otherwise: str) -> str:
    return f"'{name}'" if name else otherwise


def _write(
    options: argparse.Namespace, reports: Sequence[Chosen], catalogue: Catalogue
) -> list[str]:
    """Write the files that the options name; return their names."""
    every = [chosen.report for chosen in reports]
    if options.markdown:
        write_whole(options.markdown, print_markdown(every))
    if options.svg:
        write_whole(options.svg, draw_svg(every))
    if options.summary:
        text = _text_of(options.summary)
        write_whole(options.summary, insert_summary(text, every, options.summary))
    if options.html:
        maps = [_map(path, catalogue) for path in options.coverage]
        write_whole(options.html, render_html(_shown(options, reports), maps))
    if options.optuna:
        studies = [
            StudyOf.of_row(row, search_of(searches, row.report))
            for chosen in reports
            for searches in [chosen.searches()]
            for row in chosen.rows
        ]
        write_studies(Path(options.optuna), studies)
    if options.t4:
        _write_exchange(Path(options.t4), reports)
    return [path for name in _WRITTEN if (path := getattr(options, name))]


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise RecordError(
            f"--summary {path}: cannot be read: {getattr(error, 'strerror', None) or error}\n"
            "  it names a text file that has the lines between which the table goes"
        ) from None


def _write_exchange(folder: Path, reports: Sequence[Chosen]) -> None:
    for chosen in reports:
        searches = chosen.searches()
        for row in chosen.rows:
            search = search_of(searches, row.report)
            environment = chosen.report.environments.get(row.report.environment)
            device = environment.device if environment is not None else row.gpu
            if search.trials:
                write_exchange(folder, row, search, device)


def _shown(options: argparse.Namespace, reports: Sequence[Chosen]) -> list[Shown]:
    old = load_report(options.against) if options.against else None
    shown = []
    for chosen in reports:
        before = old if old is not None and is_comparable(old, chosen.report) else None
        pairs = [] if before is None else _pairs(options, before, chosen)
        shown.append(Shown(
            chosen.report, chosen.rows, chosen.searches(), chosen.operator, chosen.folder,
            before, pairs, _folders(options),
        ))
    if old is not None and not any(one.old for one in shown):
        raise _incomparable(options.against, old)
    return shown


def _map(path: str, catalogue: Catalogue) -> PopulationMap:
    found = load_coverage(path)
    return population_map(found, catalogue.operator(found.operator).signature)


def _folders(options: argparse.Namespace) -> str:
    """`--path` and `--out` for the commands that repeat a row; empty if both have defaults."""
    return "".join(f" {shlex.quote(word)}" for word in folder_options(options))


def _problems(chosen: Chosen, folders: str) -> str:
    searches = chosen.searches()
    return "\n".join(
        print_problem(
            row, search_of(searches, row.report),
            chosen.report.environments.get(row.report.environment), folders,
        )
        for row in chosen.rows
    )


def _print_flat(options: argparse.Namespace, reports: Sequence[Chosen]) -> None:
    rows: list[dict[str, Any]] = []
    environments: dict[str, Environment] = {}
    for chosen in reports:
        searches = chosen.searches()
        rows += [flat_row(row, search_of(searches, row.report)) for row in chosen.rows]
        environments.update(chosen.report.environments)
    print(to_csv(rows) if options.csv else to_json(rows, environments), end="")


def _print_against(options: argparse.Namespace, reports: Sequence[Chosen]) -> None:
    old = load_report(options.against)
    matching = [chosen for chosen in reports if is_comparable(old, chosen.report)]
    if not matching:
        raise _incomparable(options.against, old)
    for chosen in matching:
        print(print_pairs(old, chosen.report, _pairs(options, old, chosen)), end="")


def _pairs(options: argparse.Namespace, old: Report, chosen: Chosen) -> list[Pair]:
    before = named_rows(old, chosen.signature)
    if options.pass_name or options.problem:
        before = select(before, options.pass_name, options.problem)
    return compare_rows(before, chosen.rows)


def _incomparable(path: str, old: Report) -> OptionError:
    return OptionError(
        f"--against {path}: is of {old.operator} on {old.gpu}, which no selected report is of"
    )
