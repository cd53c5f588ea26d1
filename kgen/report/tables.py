"""Reports as Markdown: all tables of `docs/results.md`, and the short table of the README."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kgen.errors import RecordError
from kgen.model.units import format_us
from kgen.report.model import Environment, Peer, ProblemReport, Report

BEGIN = "<!-- kgen report --summary: begin -->"
END = "<!-- kgen report --summary: end -->"
_NO_VALUE = "–"
_PROSE = 118  # columns of a line of prose

_INTRODUCTION = """\
# Results

Written by `kgen report --gpu {gpu} --markdown FILE` from the committed reports; do not edit this
page.

Times are microseconds: medians of device time per call, captured in CUDA graphs. All times of one
row come from one interleaved run with a cold L2 cache, unless the row says otherwise
([measurement](measurement.md)). The fastest time of a row is bold. `floor` is the least possible
time: the least bytes over the copy bandwidth of that run, or the operations over the peak rate,
whichever is longer. A share above 100 % means that the kernel is faster than a plain copy, which
gives the caches no hints. `fastest peer / kgen` above 1 means that kgen is faster. The peer
`eager` is plain PyTorch, `torch.compile` the same code compiled; other peers are named after
their library or algorithm.

A problem lists its dims, its `dtype`, and every other field that differs from `dtype` or that a
call may leave out.
"""


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One problem with the times of its peers.

    Attributes:
        operator: Operator name.
        gpu: Profile name.
        label: The problem without redundant fields (`problem_labels`).
        report: The problem's entry.
    """

    operator: str
    gpu: str
    label: str
    report: ProblemReport

    @property
    def kgen_us(self) -> float:
        """Median time of the winner, us."""
        return self.report.chosen.timing.median_us

    @property
    def fastest(self) -> Peer | None:
        """The peer with the least median; None if the run timed no peer."""
        return min(self.report.peers, key=lambda peer: peer.timing.median_us, default=None)

    @property
    def ratio(self) -> float | None:
        """Time of the fastest peer over kgen's time; None without a peer."""
        fastest = self.fastest
        return None if fastest is None else fastest.timing.median_us / self.kgen_us


def rows_of(report: Report) -> list[ReportRow]:
    """All problems of a report, in its order."""
    labels, _ = problem_labels([p.problem for p in report.problems])
    return [
        ReportRow(report.operator, report.gpu, label, entry)
        for label, entry in zip(labels, report.problems, strict=True)
    ]


def print_markdown(reports: Sequence[Report]) -> str:
    """Return one page with a table for each operator, GPU and pass."""
    gpus = list(dict.fromkeys(report.gpu for report in reports))
    parts = [_INTRODUCTION.format(gpu=gpus[0] if len(gpus) == 1 else "GPU")]
    for report in reports:
        parts += _section(report)
    return "\n".join(parts).rstrip() + "\n"


def print_summary(reports: Sequence[Report]) -> str:
    """Return a short table: for each operator and pass, the problem with the largest floor."""
    longest: dict[tuple[str, str, str], ReportRow] = {}
    for row in (row for report in reports for row in rows_of(report)):
        key = (row.gpu, row.operator, row.report.pass_name)
        if key not in longest or row.report.floor_us > longest[key].report.floor_us:
            longest[key] = row
    head = ["operator", "problem", "kgen", "fastest peer", "share of floor", "fastest peer / kgen"]
    rows = []
    for row in longest.values():
        fastest = row.fastest
        rows.append([
            f"{row.operator} {row.report.pass_name}", row.label, format_us(row.kgen_us),
            _NO_VALUE if fastest is None
            else f"{format_us(fastest.timing.median_us)} ({fastest.name})",
            _share(row.report), _ratio(row.ratio),
        ])
    return _markdown_table(head, rows)


def insert_summary(text: str, reports: Sequence[Report], where: str) -> str:
    """Return the text with the short table between its two marker lines.

    Raises:
        RecordError: If the text lacks the markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RecordError(f"{where}: no place for the table\n  it goes between the lines\n"
                          f"  {BEGIN}\n  {END}")
    return f"{before}{begin}\n{print_summary(reports)}\n{end}{after}"


def problem_labels(problems: Sequence[str]) -> tuple[list[str], list[str]]:
    """Shorten the problems of one report.

    Left out are: a dim that equals an earlier dim, if it does in three quarters of the problems;
    an option that all problems share; a dtype of `none`; and a dtype equal to `dtype` where no
    problem of the report leaves that tensor out.

    Returns:
        The labels in the order of the problems, and the facts that hold for all problems, such as
        `V = K`, `N = B unless given` and `decay_form = log`.
    """
    fields = [dict(_pairs(problem)) for problem in problems]
    if not fields:
        return [], []
    facts: dict[str, _Fact] = {}  # by field that labels do not show, or only where it differs
    if len(fields) > 1:
        for name in fields[0]:
            fact = _common(name, fields)
            if fact is not None:
                facts[name] = fact
    optional = {name for f in fields for name, value in f.items() if value == "none"}
    return [_label(f, facts, optional) for f in fields], [fact.text for fact in facts.values()]


@dataclass(frozen=True, slots=True)
class _Fact:
    """A value that a field has in all problems, or in most.

    Attributes:
        text: The fact in words.
        same_as: The dim that the field equals; empty if all problems have the same value.
    """

    text: str
    same_as: str = ""

    def hides(self, name: str, f: Mapping[str, str]) -> bool:
        """Whether a problem's label may leave the field out."""
        return not self.same_as or f.get(name) == f.get(self.same_as)


def _pairs(problem: str) -> Iterator[tuple[str, str]]:
    for part in problem.split(","):
        name, _, value = part.partition("=")
        yield name, value


def _common(name: str, fields: Sequence[Mapping[str, str]]) -> _Fact | None:
    """The fact about a field for which labels may leave it out; None if they must show it."""
    values = [f.get(name, "") for f in fields]
    if all(value.isdecimal() for value in values):
        for other in itertools.takewhile(lambda other: other != name, fields[0]):
            same = sum(f.get(other, "") == value for f, value in zip(fields, values, strict=True))
            if same == len(fields):
                return _Fact(f"{name} = {other}", other)
            if 4 * same >= 3 * len(fields):
                return _Fact(f"{name} = {other} unless given", other)
    elif len(set(values)) == 1 and not name.endswith("dtype"):
        return _Fact(f"{name} = {values[0]}")
    return None


def _label(f: Mapping[str, str], facts: Mapping[str, _Fact], optional: set[str]) -> str:
    parts = []
    for name, value in f.items():
        if value == "none" or (name in facts and facts[name].hides(name, f)):
            continue
        if name == "dtype":
            parts.append(value)
        elif not name.endswith("_dtype"):
            parts.append(f"{name}={value}" if value.isdecimal() else f"{name} {value}")
        elif name in optional or value != f.get("dtype"):
            parts.append(f"{name.removesuffix('_dtype')} {value}")
    return " ".join(parts)


def _section(report: Report) -> Iterator[str]:
    rows = rows_of(report)
    _, facts = problem_labels([p.problem for p in report.problems])
    yield f"## {report.operator} on {report.gpu}\n"
    for environment in report.environments.values():
        yield _environment(environment) + "\n"
    if facts:
        yield f"In all problems: {', '.join(facts)}.\n"
    for pass_name in dict.fromkeys(p.pass_name for p in report.problems):
        yield f"### {report.operator} {pass_name}\n"
        chosen = [row for row in rows if row.report.pass_name == pass_name]
        yield _table(chosen) + "\n"
        yield from _remarks(chosen)


def _environment(e: Environment) -> str:
    facts = [e.device]
    if e.driver:
        facts.append(f"driver {e.driver}")
    facts += [f"{e.compiler} {e.compiler_version}", f"torch {e.torch}"]
    if e.copy_gbps is not None:
        facts.append(f"copy bandwidth {e.copy_gbps:.0f} GB/s")
    return ", ".join(facts) + "."


def _table(rows: Sequence[ReportRow]) -> str:
    peers = list(dict.fromkeys(peer.name for row in rows for peer in row.report.peers))
    head = ["problem", "kgen", *peers, "floor", "share of floor", "fastest peer / kgen"]
    several = any(row.report.chosen.timing.others for row in rows)
    head += ["kgen by inputs"] if several else []
    cells = []
    for row in rows:
        times = {peer.name: peer.timing.median_us for peer in row.report.peers}
        least = min(row.kgen_us, *times.values()) if times else row.kgen_us
        cells.append([
            row.label, _time(row.kgen_us, least),
            *(_time(times[n], least) if n in times else _NO_VALUE for n in peers),
            format_us(row.report.floor_us), _share(row.report), _ratio(row.ratio),
            *([_by_inputs(row.report)] if several else []),
        ])
    return _markdown_table(head, cells)


def _by_inputs(report: ProblemReport) -> str:
    """The times on the kinds of inputs: `random 480, trained 1892`."""
    times = report.chosen.timing.by_inputs_us.items()
    return ", ".join(f"{inputs} {format_us(us)}" for inputs, us in times)


def _time(us: float, least: float) -> str:
    return f"**{format_us(us)}**" if us == least else format_us(us)


def _share(report: ProblemReport) -> str:
    share = 100 * report.floor_share
    return f"{share:.0f} %" if share >= 1 else f"{share:.1f} %"


def _ratio(ratio: float | None) -> str:
    return _NO_VALUE if ratio is None else f"{ratio:.2f}"


def _remarks(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Remarks on single rows of a table."""
    remarks = []
    if not any(row.report.peers for row in rows):
        remarks.append("- No peer was timed in the runs of this table.")
    if any(row.report.chosen.timing.others for row in rows):
        remarks.append("- Of the times by inputs the slower counts, for kgen and for each peer "
                       "([timing inputs](measurement.md#inputs)).")
    for row in rows:
        if row.report.slowed:
            remarks.append(f"- {row.label}: clocks were held down during the run "
                           f"({row.report.slowed}).")
        if "cold L2" not in row.report.chosen.timing.protocol:
            remarks.append(f"- {row.label}: too small to leave L2, which was not cold.")
    for remark in remarks:
        yield textwrap.fill(remark, _PROSE, subsequent_indent="  ", break_long_words=False,
                            break_on_hyphens=False)
    if remarks:
        yield ""


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
