"""Reports of times on several inputs: both are shown, the slower counts, old ones are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_bench_parts import CLIMB, CONTEST
from test_report_brief import COMMITTED, entry, report, rows

from kgen.bench.printing import print_comparison, print_ladder
from kgen.bench.results import PeerComparison
from kgen.catalogue import open_catalogue
from kgen.coverage import CoveredProblem
from kgen.coverage.printing import print_problem as print_covered
from kgen.errors import RecordError
from kgen.model.record import RANDOM, TRAINED, OtherTime, Timing
from kgen.report import load_report, print_report
from kgen.report.by_inputs import by_inputs
from kgen.report.codec import decode, encode
from kgen.report.details import print_problem
from kgen.report.flat import flat_row, to_csv
from kgen.report.model import Peer, ProblemReport
from kgen.report.page_data import _timing
from kgen.report.searches import Search
from kgen.report.tables import print_markdown

BRANCHING = Timing(
    1892.0, 1890.0, 1895.0, 41, "graph of 4, cold L2", TRAINED,
    (OtherTime(RANDOM, 476.0, 475.0, 477.0),),
)
STEADY = replace(
    BRANCHING, median_us=1722.0, inputs=RANDOM,
    others=(OtherTime(TRAINED, 1720.0, 1719.0, 1721.0),),
)
TEXT = "476 us on random inputs, 1892 us on trained inputs (counts, the slower)"
PEER_TEXT = "1722 us on random inputs (counts, the slower), 1720 us on trained inputs"


def branching() -> ProblemReport:
    plain = entry()
    chosen = replace(plain.chosen, timing=BRANCHING)
    return replace(plain, chosen=chosen, peers=(Peer("fla", STEADY),))


def test_the_text_names_what_counts() -> None:
    assert by_inputs(BRANCHING) == TEXT
    assert by_inputs(STEADY) == PEER_TEXT
    assert by_inputs(replace(STEADY, others=())) == ""


def test_a_report_keeps_both_times_and_refuses_a_broken_one() -> None:
    text = encode(report(branching(), entry("M=1,N=4096")))
    read = decode(text, "it")
    new, old = read.problems  # written with six digits
    assert (new.chosen.timing, new.peers[0].timing) == (BRANCHING, STEADY)
    assert (old.chosen.timing.inputs, old.chosen.timing.others) == (RANDOM, ())
    assert "inputs: trained" in text
    with pytest.raises(RecordError, match=r"it:\d+: .*others\[0\]\.median_us: must be"):
        decode(text.replace("median_us: 476.0", "median_us: fast"), "it")


def test_committed_reports_without_them_are_read() -> None:
    read = load_report(COMMITTED / "kgen_ops" / "rmsnorm" / "reports" / "h200.yaml")
    old = replace(read, problems=tuple(p for p in read.problems if not p.chosen.timing.others))
    assert {p.chosen.timing.inputs for p in old.problems} == {RANDOM}
    assert "kgen by inputs" not in print_markdown([old])


def test_every_form_shows_both_times() -> None:
    (row,) = rows(branching())
    printed = print_report(report(branching()))
    assert f"    inputs  kgen: {TEXT}\n    inputs  fla: {PEER_TEXT}\n" in printed
    shown = print_problem(row, Search(()), None)
    assert TEXT in shown
    assert PEER_TEXT in shown
    page = print_markdown([report(branching(), entry("M=1,N=4096"))])
    assert "kgen by inputs |" in page
    assert "| random 476, trained 1892 |" in page
    assert "| random 10 |" in page
    assert "the slower counts" in page
    flat = flat_row(row, Search(()))
    assert (flat["inputs"], flat["random_us"], flat["trained_us"]) == (TRAINED, 476.0, 1892.0)
    (old,) = rows(entry())
    assert to_csv([flat_row(old, Search(()))]).splitlines()[1].count(",random,10.0,,") == 1
    assert _timing(BRANCHING) == {"us": 1892.0, "low": 1890.0, "high": 1895.0, "inputs": TEXT}
    assert "inputs" not in _timing(entry().chosen.timing)


def test_bench_and_ladder_show_both_times() -> None:
    kernel = replace(CONTEST.kernel, timing=BRANCHING)
    peers = (replace(CONTEST.peers[0], timing=STEADY), CONTEST.peers[1])
    contest: PeerComparison = replace(CONTEST, kernel=kernel, peers=peers)
    printed = print_comparison(contest)
    assert f"  kgen: {TEXT}\n  eager: {PEER_TEXT}\n  graph of 4" in printed
    rungs = (replace(CLIMB.rungs[0], timing=BRANCHING), CLIMB.rungs[1])
    assert f"  naive: {TEXT}\n" in print_ladder(replace(CLIMB, rungs=rungs))


def test_coverage_shows_both_times() -> None:
    signature = open_catalogue().operator("rmsnorm").signature
    found = CoveredProblem(
        "forward", "M=1,N=8,dtype=fp32", "exact", kernel_us=1892.0, inputs=TRAINED, other_us=476.0
    )
    assert "1892 us on trained inputs (476 us on random ones)" in print_covered(found, signature)
    old = replace(found, inputs="", other_us=None)
    assert "exact, 1892 us" in print_covered(old, signature)
    assert "inputs" not in print_covered(old, signature)
