"""`kgen measure-check` on the host: it runs, and says and writes what it found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROBLEM = "M=3,N=32,dtype=fp32"
SOFTMAX = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "softmax"


@pytest.fixture
def softmax(tmp_path: Path) -> Path:
    """A copy of the operator in fp32 alone: each tune certifies the safe variant in every dtype."""
    copy = tmp_path / "operator"
    shutil.copytree(SOFTMAX, copy)
    module = copy / "operators" / "softmax.py"
    text, dtypes = module.read_text(), '("fp32", "fp16", "bf16")'
    assert dtypes in text
    module.write_text(text.replace(dtypes, '("fp32",)'))
    return copy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


def measure_check(cwd: Path, operator: Path, *more: str) -> subprocess.CompletedProcess[str]:
    named = ("--gpu", "host", "--op", "softmax", "--path", str(operator))
    return subprocess.run(
        [sys.executable, "-m", "kgen", "measure-check", *named, *more],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_reports_its_own_quality(folder: Path, softmax: Path) -> None:
    done = measure_check(
        folder, softmax, "--problem", PROBLEM, "--trials", "2", "--tunes", "2", "--runs", "1",
        "--l2", "warm", "--yaml", "quality.yaml",
    )
    assert done.returncode == 0, done.stderr
    for part in ("same kernel as 4 contenders", "winners of 2 independent tunes", "library call"):
        assert part in done.stdout
    assert "difference of a kernel to itself" in done.stdout
    data = yaml.safe_load((folder / "quality.yaml").read_text())
    (problem,) = data["problems"]
    assert (data["operator"], data["gpu"], data["l2"]) == ("softmax", "host", "warm")
    (run,) = problem["same_kernel"]["runs"]
    assert len(run["medians_us"]) == 4
    assert len(run["differences"]) == 2
    assert all("1 buffer set" in protocol for protocol in run["protocols"])
    assert [winner["seed"] for winner in problem["winners"]] == [0, 1]
    assert min(winner["regret"]["median"] for winner in problem["winners"]) == 0
    assert problem["library"]["library_us"] > 0
    assert len(data["verdicts"]) == 2
    # Tunes and libraries were made in temporary folders.
    assert [path.name for path in folder.iterdir()] == ["quality.yaml"]


def test_a_mistake_is_found_before_the_work(folder: Path, softmax: Path) -> None:
    done = measure_check(folder, softmax, "--yaml", "no/such/folder/file.yaml")
    assert done.returncode != 0
    assert "--yaml FILE" in done.stderr
    assert "tune 1" not in done.stdout
