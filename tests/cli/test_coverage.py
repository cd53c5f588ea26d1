"""`kgen coverage`: which step serves each problem, how fast, and what a search would give."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import yaml
from tuned_rmsnorm import TINY

from kgen.build import Compiler
from kgen.catalogue import open_catalogue
from kgen.cli import coverage_command
from kgen.cli.main import main
from kgen.coverage import (
    CoverageReport,
    CoverageRequest,
    CoveredProblem,
    Timing,
    load_coverage,
    population_map,
    print_coverage,
    write_coverage,
)
from kgen.coverage.job import in_order
from kgen.errors import RecordError
from kgen.model.problem import Problem

OTHER = "M=5,N=96,dtype=fp32"
GENERATED = str(Path(__file__).resolve().parents[2] / "generated")


def coverage(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kgen", "coverage", *arguments], cwd=cwd, capture_output=True,
        text=True, check=False, timeout=480,
    )


def test_problems_are_verified_and_timed_beside_peers(tuned: Path, tmp_path: Path) -> None:
    written = tmp_path / "coverage.yaml"
    done = coverage(
        tuned, "--op", "rmsnorm", "--gpu", "host", "--pass", "forward", "--problem", TINY,
        "--problem", OTHER, "--against", "eager", "--sample", "1", "--search-time", "2s",
        "--first-calls", "--yaml", str(written))
    assert done.returncode == 0, done.stderr
    exact, family = yaml.safe_load(written.read_text())["problems"]
    assert (exact["step"], family["step"]) == ("exact", "family")
    for row in (exact, family):
        assert row["failed"] == ""
        assert row["floor_us"] < row["kernel_us"]
        assert row["call_us"] > 0
        assert row["peer"] == "eager"
        # Medians of rounds, and of their ratios, on a busy machine.
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["kernel_us"], rel=0.6)
        assert row["first_ms"] > 0
    searched = [row for row in (exact, family) if row["best"]]
    assert len(searched) == 1
    assert searched[0]["loss"] >= 0
    assert "rmsnorm on host, --problem" in done.stdout
    assert "forward: 2 problems: exact 1, family 1" in done.stdout
    assert "loss against a search of the very problem, over 1" in done.stdout


def test_a_limited_time_reaches_a_part_and_lists_all(tuned: Path, tmp_path: Path) -> None:
    written = tmp_path / "coverage.yaml"
    sizes = [f"M=3,N={n},dtype=fp32" for n in (32, 64, 96)]
    done = coverage(
        tuned, "--op", "rmsnorm", "--gpu", "host", "--pass", "forward", "--against", "eager",
        *(part for size in sizes for part in ("--problem", size)), "--time", "0.1s", "--yaml",
        str(written))
    assert done.returncode == 0, done.stderr
    report = load_coverage(written)
    timed, *asked = report.problems
    assert {p.problem.split(",w_dtype")[0] for p in report.problems} == set(sizes)
    assert timed.kernel_us is not None
    assert [(p.step, p.kernel_us, p.failed) for p in asked] == [("family", None, "")] * 2
    assert report.environment is not None
    assert "over 1: geometric mean" in done.stdout


@pytest.mark.quick
def test_what_was_timed_stays_if_the_run_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = CoveredProblem("forward", TINY, "exact", "rows(vec=8)", kernel_us=12.5)

    def ended(request: CoverageRequest) -> Iterator[CoverageReport]:
        yield CoverageReport("rmsnorm", "host", (), None, (timed,))
        raise KeyboardInterrupt

    monkeypatch.setattr(coverage_command, "coverage", ended)
    written = tmp_path / "coverage.yaml"
    main(["coverage", "--op", "rmsnorm", "--gpu", "host", "--problem", TINY, "--out", GENERATED,
          "--yaml", str(written)])
    assert load_coverage(written).problems == (timed,)


@pytest.mark.quick
def test_a_limited_time_takes_problems_in_an_order_drawn_by_the_seed() -> None:
    problems = tuple(Problem((("M", m), ("N", 8)), (("dtype", "fp32"),)) for m in range(20))
    whole = Timing(0, cast(Compiler, None), None, 0, 5.0, False)
    assert in_order(problems, whole, 1) == problems
    limited = replace(whole, time_s=60.0)
    drawn = in_order(problems, limited, 1)
    assert sorted(drawn, key=problems.index) == list(problems)
    assert problems != drawn == in_order(problems, limited, 1) != in_order(problems, limited, 2)


@pytest.mark.quick
def test_steps_need_no_gpu(tmp_path: Path) -> None:
    done = coverage(tmp_path, "--op", "timex", "--gpu", "a100", "--steps", "--out", GENERATED,
                    "--pass", "backward")
    assert done.returncode == 0, done.stderr
    assert "timex on a100, timex\n  backward: " in done.stdout
    assert ": family\n" in done.stdout


@pytest.mark.quick
def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    for arguments, error in [
        (["--op", "timex", "--gpu", "a100", "--out", GENERATED], "in this machine (--gpu a100)"),
        (["--op", "timex", "--gpu", "a100", "--steps", "--sample", "3"], "--steps times nothing"),
        (["--op", "timex", "--gpu", "a100", "--steps", "--time", "3s"], "so --time has no meaning"),
        (["--op", "timex", "--gpu", "h200", "--steps"], "there is no library in generated"),
        (["--gpu", "a100", "--steps"], "add --op OP"),
        (["--op", "timex", "--gpu", "a100", "--steps", "--yaml", "."], "--yaml .: is a folder"),
        (["--population", "rwkv6", "--op", "timex", "--steps", "--out", GENERATED],
         "'rwkv6' has no problems of timex"),
    ]:
        done = coverage(tmp_path, *arguments)
        assert done.returncode in (1, 2), (arguments, done.stdout)
        assert error in done.stderr, (arguments, done.stderr)


@pytest.mark.quick
def test_the_table_tells_the_tail() -> None:
    ratios = [0.5, *[2.0] * 9]
    problems = (
        *(CoveredProblem("forward", "M=1,N=1", "family", "rows(vec=1)", ratio=ratio,
                         loss=0.1 if ratio < 1 else 0.0) for ratio in ratios),
        CoveredProblem("forward", "M=1,N=2", "none"),
        CoveredProblem("forward", "M=1,N=3", "safe", failed="wrong"),
    )
    text = print_coverage(CoverageReport("rmsnorm", "h200", ("ours",), None, problems))
    assert text.splitlines() == [
        "rmsnorm on h200, ours",
        "  forward: 12 problems: family 10, safe 1, none 1",
        "    fastest peer / kgen over 10: geometric mean 1.74, tenth percentile 1.85, worst 0.50",
        "    loss against a search of the very problem, over 10: mean 1.0 %, ninetieth percentile "
        "1.0 %, worst 10.0 %",
        "    1 could not be timed; their lines say why",
    ]


@pytest.mark.quick
def test_a_written_coverage_is_read_and_mapped(tmp_path: Path) -> None:
    signature = open_catalogue([]).operator("rmsnorm").signature
    timed = CoveredProblem("forward", "M=8192,N=4096,dtype=bf16", "family", "rows(vec=8)",
                           floor_us=10.0, kernel_us=12.5, peer="liger", peer_us=25.0, ratio=2.0)
    refused = CoveredProblem("forward", "M=5,N=96,dtype=fp32", "none", failed="no kernel")
    report = CoverageReport("rmsnorm", "h200", ("models",), None, (timed, refused))
    file = tmp_path / "coverage.yaml"
    write_coverage(file, report)
    assert load_coverage(file) == report
    drawn = population_map(load_coverage(file), signature)
    assert [(p.name, p.step, p.ratio, p.failed) for p in drawn.problems] == [
        ("M8192 N4096 bf16", "family", 2.0, ""), ("M5 N96 fp32", "none", None, "no kernel")]
    assert "geometric mean 2.00" in drawn.summary


@pytest.mark.quick
def test_a_coverage_that_cannot_be_drawn_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "coverage.yaml"
    page = ["report", "--out", GENERATED, "--html", str(tmp_path / "page.html")]
    assert main([*page, "--coverage", str(file)]) != 0
    assert "no such coverage; kgen coverage --yaml writes it" in capsys.readouterr().err
    write_coverage(file, CoverageReport("rmsnorm", "h200", (), None, (
        CoveredProblem("forward", "M=8192,Q=4096,dtype=bf16", "safe"),)))
    with pytest.raises(RecordError, match=r"of another signature: .*Q"):
        population_map(load_coverage(file), open_catalogue([]).operator("rmsnorm").signature)
    file.write_text(file.read_text().replace("step: safe", "stop: safe"))
    assert main([*page, "--coverage", str(file)]) != 0
    assert f"{file}:10: problems[0].stop: unknown key" in capsys.readouterr().err
    assert main(["report", "--out", GENERATED, "--coverage", str(file)]) == 2
    assert "--coverage is drawn on the page of --html" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
