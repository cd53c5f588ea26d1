"""`kgen report`: screens, single problems, flat data, comparison with an older report."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.cli.main import main
from kgen.errors import CatalogueError
from kgen.model.config import Config
from kgen.model.record import Fate, Record, Timing
from kgen.report import (
    Chosen,
    Environment,
    Peer,
    ProblemReport,
    Report,
    ReportRow,
    RuleCount,
    RunnerUp,
    SpaceSummary,
    Trials,
    write_report,
)
from kgen.report.brief import print_brief
from kgen.report.compared import compare_rows, print_pairs
from kgen.report.details import print_problem
from kgen.report.flat import flat_row, to_csv, to_json
from kgen.report.names import named_rows, select
from kgen.report.searches import Search, searches_of
from kgen.report.verdicts import Tally, is_tie, standing

COMMITTED = Path(__file__).parents[2] / "generated"


def timing(median: float, spread: float = 0.01) -> Timing:
    return Timing(median, median * (1 - spread), median * (1 + spread), 41, "graph of 4, cold L2")


def entry(name: str = "M=64,N=4096", ours: float = 10.0, *peers: float) -> ProblemReport:
    return ProblemReport(
        pass_name="forward",
        problem=f"{name},dtype=bf16,w_dtype=bf16,residual_dtype=none,rstd_dtype=none",
        environment="e1",
        space=SpaceSummary(100, 40, (RuleCount("vec <= 8", "one load moves 16 bytes", "x:1", 60),)),
        trials=Trials(12, {"verified": 10, "wrong": 2}, {"y is wrong": 2}, 3.0, 2.0),
        chosen=Chosen("warp", {"lanes": 32}, "7f3a0000", "s", timing(ours), ()),
        floor_us=8.0,
        floor_share=8.0 / ours,
        peers=tuple(Peer(f"peer{i}", timing(us)) for i, us in enumerate(peers)),
        accuracy=(),
        runner_up=RunnerUp("warp", {"lanes": 16}, "7f3a0001", ours * 1.005, 1.005),
    )


ENVIRONMENT = Environment("NVIDIA H200", "580", "nvrtc", "13.0", "2.11", "3.12", "0.1", "abc", 4e3)


def report(*entries: ProblemReport) -> Report:
    return Report("rmsnorm", "h200", {"e1": ENVIRONMENT}, entries)


def rows(*entries: ProblemReport) -> list[ReportRow]:
    from kgen.catalogue import open_catalogue

    return named_rows(report(*entries), open_catalogue().operator("rmsnorm").signature)


FASTER, TIE, SLOWER, ALONE = (
    entry("M=1,N=8", 10.0, 15.0, 12.0), entry("M=2,N=8", 10.0, 10.1), entry("M=3,N=8", 10.0, 9.0),
    entry("M=4,N=8", 10.0),
)
ALL = (FASTER, TIE, SLOWER, ALONE)


def test_overlapping_quartiles_are_a_tie() -> None:
    assert [standing(e) for e in ALL] == ["faster", "tie", "slower", "alone"]
    assert is_tie(timing(10.0), timing(10.2))
    assert not is_tie(timing(10.0), timing(10.3))
    assert str(Tally.of(rows(*ALL))) == (
        "1 faster, 1 tied, 1 slower, 1 without a peer, mean 1.03x"
    )


def test_a_screen_shows_each_problem_on_a_line_of_80_columns() -> None:
    text = print_brief(report(*ALL), rows(*ALL))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "rmsnorm on h200 (NVIDIA H200, nvrtc 13.0, torch 2.11)"
    assert lines[4].split() == ["M1", "N8", "bf16", "10", "80", "%", "1.20x", "peer1"]
    assert lines[5].endswith("tie   peer0")
    assert lines[6].endswith("0.90x peer0 (slower)")
    assert lines[7].endswith("no peer timed")


def test_a_long_pass_shows_the_rows_with_the_least_lead() -> None:
    many = [entry(f"M={m},N=8", 10.0, 10.0 + m) for m in range(1, 31)]
    lines = print_brief(report(*many), rows(*many)).splitlines()
    assert len(lines) == 4 + 16 + 1
    assert lines[-1] == ("  14 more lead by more: kgen report --op rmsnorm --pass forward")
    assert len(print_brief(report(*many), rows(*many), whole=True).splitlines()) == 4 + 30


@pytest.mark.parametrize(("text", "count"), [
    ("M1 N8 bf16", 1), ("bf16", 4), ("N=8", 4), ("M=2,N=8,dtype=bf16", 1), ("7f3a0000", 4),
])
def test_problems_are_selected_by_words_of_either_form(text: str, count: int) -> None:
    assert len(select(rows(*ALL), None, [text])) == count


def test_selecting_nothing_names_what_there_is() -> None:
    with pytest.raises(CatalogueError, match="no problem of the reports is 'fp16'"):
        select(rows(*ALL), None, ["fp16"])
    with pytest.raises(CatalogueError, match="rmsnorm forward M1 N8 bf16"):
        select(rows(*ALL), "backward", [])


def trial(us: float | None, problem: str = FASTER.problem) -> Record:
    return Record(
        key="", operator="rmsnorm", pass_name="forward", problem=problem, gpu="h200",
        config=Config("warp", (("lanes", 32),)),
        fate=Fate.VERIFIED if us else Fate.WRONG, timing=timing(us) if us else None,
    )


def test_the_best_of_the_search_and_the_final_are_told_apart() -> None:
    search = searches_of([trial(12.0), trial(None), trial(9.7)])["forward", FASTER.problem]
    text = print_problem(rows(FASTER)[0], search, ENVIRONMENT)
    assert "    kgen             10 us (9.9 to 10.1)  warp(lanes=32)\n" in text
    assert "best of the search, measured once: 9.7 us  warp(lanes=32)" in text
    assert "runner-up     10.05 us 1.005x, a tie" in text
    assert "kgen tune --op rmsnorm --gpu h200 --pass forward --problem 'M1 N8 bf16'" in text
    elsewhere = print_problem(rows(FASTER)[0], search, ENVIRONMENT, " --out 'my library'")
    assert "kgen verify --op rmsnorm --gpu h200 --out 'my library' --record" in elsewhere
    flat = flat_row(rows(FASTER)[0], search)
    assert (flat["median_us"], flat["search_best_us"], flat["standing"]) == (10.0, 9.7, "faster")


def test_flat_data() -> None:
    flat = [flat_row(row, Search(())) for row in rows(*ALL)]
    table = list(csv.DictReader(io.StringIO(to_csv(flat))))
    assert [line["standing"] for line in table] == ["faster", "tie", "slower", "alone"]
    assert (table[0]["peer1_us"], table[1]["peer1_us"]) == ("12.0", "")
    assert json.loads(table[0]["config"]) == {"lanes": 32}
    data = json.loads(to_json(flat, {"e1": ENVIRONMENT}))
    assert data["rows"] == flat
    assert data["environments"]["e1"]["device"] == "NVIDIA H200"


def test_two_reports_are_compared() -> None:
    def again(e: ProblemReport, us: float) -> ProblemReport:
        return replace(e, chosen=replace(e.chosen, timing=timing(us), record="8" * 8))

    old, new = (FASTER, TIE, SLOWER, ALONE), (again(FASTER, 8.0), again(TIE, 10.1), SLOWER,
                                              entry("M=9,N=8", 1.0))
    pairs = compare_rows(rows(*old), rows(*new))
    assert [pair.change for pair in pairs] == ["faster", "tie", "stale", "new", "gone"]
    later = replace(report(*new), environments={"e1": replace(ENVIRONMENT, driver="590")})
    text = print_pairs(report(*old), later, pairs)
    assert "  driver: 580 -> 590\n" in text
    assert "faster: 1 (the quartiles lie below the old ones)\n  forward   M1 N8 bf16" in text
    assert "10 -> 8 us  1.250x" in text


def test_the_command_prints_screens_problems_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "kgen_ops" / "rmsnorm" / "reports"
    write_report(where / "h200.yaml", report(*ALL))
    write_report(tmp_path / "old.yaml", report(*ALL))

    def said(*options: str) -> str:
        assert main(["report", "--out", str(tmp_path), *options]) == 0
        return capsys.readouterr().out

    assert "us: median of the final" in said()
    assert "final: winner and peers took turns" in said("--problem", "M1")
    assert "chosen  warp(lanes=32)" in said("--full")
    assert said("--csv").count("\n") == 5
    assert len(json.loads(said("--json", "--problem", "M1"))["rows"]) == 1
    assert "stale: 4" in said("--against", str(tmp_path / "old.yaml"))
    assert main(["report", "--out", str(tmp_path), "--op", "timex"]) == 2
    assert main(["report", "--out", str(tmp_path), "--pass", "backward"]) == 2


@pytest.mark.skipif(not COMMITTED.is_dir(), reason="no committed library")
def test_every_committed_operator_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    # A tune of one's own adds a screen of its GPU.
    assert main(["report", "--out", str(COMMITTED), "--gpu", "h200"]) == 0
    screens = capsys.readouterr().out.split(" on h200 (")
    assert max(len(screen.splitlines()) for screen in screens) <= 42
    assert max(map(len, screens[1].splitlines())) <= 80


def test_times_of_a_cpu_come_with_a_warning() -> None:
    warning = "times say nothing of a GPU's"
    assert warning not in print_brief(report(FASTER), rows(FASTER))
    of_cpu = replace(report(FASTER), gpu="host")
    assert warning in print_brief(of_cpu, rows(FASTER)).splitlines()[1]
