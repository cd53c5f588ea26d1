"""Reports: round trip, schema violations, merging, and the printed text."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.errors import RecordError, StorageError
from kgen.model.record import OutputAccuracy, Timing
from kgen.report import (
    Chosen,
    Environment,
    KernelReport,
    Peer,
    ProblemReport,
    Report,
    RuleCount,
    RunnerUp,
    SpaceSummary,
    Trials,
    load_report,
    merge_reports,
    print_report,
    update_report,
    write_report,
)

ENVIRONMENT = Environment(
    device="NVIDIA H200", driver="580.65", compiler="nvrtc", compiler_version="13.0.88",
    torch="2.11.0", python="3.12.3", kgen="0.1.0", commit="0123456789abcdef", copy_gbps=4123.4,
    sm_clock_mhz=1980.0,
)


def problem_report(problem: str = "M=64,N=4096,dtype=bf16", **changes: object) -> ProblemReport:
    """A complete entry; `changes` replace fields."""
    timing = Timing(2.5, 2.4, 2.625, 97, "graph of 64, cold L2")
    entry = ProblemReport(
        pass_name="forward", problem=problem, environment="e1",
        space=SpaceSummary(1200, 340, (
            RuleCount("vec * itemsize <= 16", "one load moves at most 16 bytes",
                      "rmsnorm.yaml:10", 860),
        )),
        trials=Trials(200, {"verified": 180, "rejected": 20}, {"spills 128 bytes": 20}, 12.5, 8.25),
        chosen=Chosen(
            "warp", {"lanes": 32, "vec": 8, "stream": True}, "7f3a0000", "0123456789ab", timing,
            (KernelReport("rmsnorm_forward", 128, 40, 0, 16, 0, 0.75),),
        ),
        floor_us=2.0, floor_share=0.8,
        peers=(Peer("eager", Timing(5.0, 4.9, 5.1, 97, "graph of 64, cold L2")),
               Peer("torch.compile", Timing(3.0, 2.9, 3.1, 97, "graph of 64, cold L2"))),
        accuracy=(OutputAccuracy("y", 0.0039, 0.0078, 0.0041),),
        runner_up=RunnerUp("warp", {"lanes": 16}, "aa000000", 2.55, 1.02),
    )
    return replace(entry, **changes)  # type: ignore[arg-type]


REPORT = Report("rmsnorm", "h200", {"e1": ENVIRONMENT}, (problem_report(),))

GOLDEN = Path(__file__).with_name("test_report_printed.txt")


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "h200.yaml"
    write_report(path, REPORT)
    assert load_report(path) == REPORT
    first = path.read_bytes()
    write_report(path, load_report(path))
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == ["h200.yaml"]


def test_optional_values_round_trip(tmp_path: Path) -> None:
    bare = problem_report(runner_up=None, peers=(), accuracy=())
    kernel = KernelReport("k", 32, None, None, None, 0, None)
    bare = replace(bare, chosen=replace(bare.chosen, config={}, kernels=(kernel,)))
    report = replace(REPORT, problems=(bare,))
    write_report(tmp_path / "r.yaml", report)
    assert load_report(tmp_path / "r.yaml") == report


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema: 1", "schema: 7", "schema is 7; this kgen reads 1"),
        ("  size: 1200\n", "  size: many\n", "problems[0].space.size: must be a whole number"),
        ("      size: 1200\n", "", "problems[0].space.size: missing"),
        ("  feasible: 340\n", "  feasibel: 340\n", "problems[0].space.feasibel: unknown key"),
        ("      verified: 180", "      fine: 180", "unknown fate 'fine'"),
        ("environment: e1", "environment: e2", "'e2' is not among 'environments'"),
        ("floor_us: 2.0", "floor_us: -2.0", "floor_us: -2.0 must be >= 0"),
        ("    peers:\n", "    peers: []\n    peeers:\n", "problems[0].peeers: unknown key"),
        ("    peers:\n", "    peers: []\n    peers:\n", "problems[0].peers: given twice"),
        ("operator: rmsnorm", "operator: [rmsnorm]", "operator: must be text, not a list"),
        ("operator: rmsnorm", "operator: {", "not valid YAML"),
    ],
)
def test_schema_violations_name_the_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    write_report(path, REPORT)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RecordError) as raised:
        load_report(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_violations_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    write_report(path, REPORT)
    lines = path.read_text().splitlines()
    line = next(i for i, text in enumerate(lines) if "feasible" in text)
    lines[line] = lines[line].replace("340", "[]")
    path.write_text("\n".join(lines))
    with pytest.raises(RecordError, match=rf"r\.yaml:{line + 1}: problems\[0\]\.space\.feasible"):
        load_report(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such report"):
        load_report(tmp_path / "none.yaml")


def test_warm_times_and_throttled_finals_are_said(tmp_path: Path) -> None:
    entry = problem_report(l2="warm", slowed="power cap")
    report = replace(REPORT, problems=(entry,))
    write_report(tmp_path / "h200.yaml", report)
    assert load_report(tmp_path / "h200.yaml") == report
    text = print_report(report)
    assert "timed   with warm L2: graph of 64" in text
    assert "suspect the GPU was slowed while it was timed: power cap" in text


def test_reports_older_than_the_choice_of_l2_are_cold(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    write_report(path, REPORT)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(x for x in lines if x.split(":")[0].strip() not in ("l2", "slowed")))
    assert len(path.read_text().splitlines()) == len(lines) - 2
    assert load_report(path) == REPORT


def test_a_later_tune_keeps_other_problems(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    update_report(path, REPORT)
    wide = problem_report("M=1024,N=4096,dtype=bf16")
    again = replace(problem_report(floor_share=0.9), environment="e2")
    new = Report("rmsnorm", "h200", {"e2": replace(ENVIRONMENT, driver="999")}, (again,))
    update_report(path, replace(REPORT, problems=(wide,)))
    merged = update_report(path, new)
    assert merged == load_report(path)
    assert [(p.problem, p.floor_share) for p in merged.problems] == [
        ("M=64,N=4096,dtype=bf16", 0.9), ("M=1024,N=4096,dtype=bf16", 0.8),
    ]
    assert set(merged.environments) == {"e1", "e2"}


def test_environments_that_nothing_names_are_dropped() -> None:
    new = Report("rmsnorm", "h200", {"e2": ENVIRONMENT}, (problem_report(environment="e2"),))
    assert set(merge_reports(REPORT, new).environments) == {"e2"}


def test_merging_other_operators_is_refused() -> None:
    with pytest.raises(RecordError, match="cannot merge a report of softmax"):
        merge_reports(REPORT, replace(REPORT, operator="softmax"))


def test_unwritable_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_report(tmp_path / "file" / "r.yaml", REPORT)


def test_the_compilers_remarks(tmp_path: Path) -> None:
    remark = "C7512: wgmma.mma_async instructions are serialized due to too few registers"
    entry = problem_report()
    entry = replace(entry, chosen=replace(entry.chosen, remarks=(remark,)))
    report = replace(REPORT, problems=(entry,))
    write_report(tmp_path / "r.yaml", report)
    assert load_report(tmp_path / "r.yaml") == report
    assert f"    remark  of the compiler, {remark}\n" in print_report(report)
    assert "remark" not in print_report(REPORT)


def test_printed_text() -> None:
    printed = print_report(REPORT)
    if os.environ.get("KGEN_UPDATE_GOLDEN"):
        GOLDEN.write_text(printed)
    assert printed == GOLDEN.read_text()


def test_empty_report_prints() -> None:
    assert "no problems yet" in print_report(Report("rmsnorm", "h200", {}, ()))
