"""`kgen coverage`: which step serves each problem, how fast, and what a search would give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tuned_rmsnorm import TINY

from kgen.coverage import CoverageReport, CoveredProblem, print_coverage

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
        (["--op", "timex", "--gpu", "h200", "--steps"], "there is no library in generated"),
        (["--gpu", "a100", "--steps"], "add --op OP"),
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
