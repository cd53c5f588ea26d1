"""`kgen predict` and `kgen tune` for a GPU that is not in this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kgen.runtime import nvrtc

ROOT = Path(__file__).parents[2]
JOURNAL = "kgen_ops/rmsnorm/reports/h200.trials.jsonl"
PROBLEM = "M=64,N=256,dtype=bf16"
FEW = ("--pass", "forward", "--problem", PROBLEM)

needs_nvrtc = pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")


def kgen(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kgen", *arguments], cwd=cwd, capture_output=True, text=True,
        timeout=480, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder whose library `generated` has only some searches of rmsnorm on an H200."""
    lines = [
        line for line in (ROOT / "generated" / JOURNAL).read_text().splitlines()
        if '"pass": "forward"' in line and "cold L2" in line
    ][:120]
    path = tmp_path / "generated" / JOURNAL
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines) + "\n")
    return tmp_path


@needs_nvrtc
def test_a_tune_without_the_gpu_predicts(recorded: Path) -> None:
    before = (recorded / "generated" / JOURNAL).read_bytes()
    done = kgen("tune", "--op", "rmsnorm", "--gpu", "a100", *FEW, cwd=recorded)
    assert done.returncode == 0, done.stderr
    assert "no NVIDIA A100 80 GB in this machine: rows are predicted, not measured" in done.stdout
    assert "learnt from" in done.stdout
    assert "predicted: about" in done.stdout
    library = recorded / "generated/kgen_ops/rmsnorm"
    assert (recorded / "generated" / JOURNAL).read_bytes() == before
    assert not (library / "reports/a100.trials.jsonl").exists(), "nothing was measured"
    (line,) = (library / "reports/predicted/a100.jsonl").read_text().splitlines()
    certificate = json.loads(line)
    assert "time_us" not in certificate
    runs = certificate["evidence"]["host"]
    assert [run["compiler"].split()[0] for run in runs] == ["host", "host-asan"]
    assert certificate["evidence"]["tried"] == []
    assert "origin: predicted" in (library / "tables/a100.yaml").read_text()
    assert list((library / "kernels").glob("*.sm_80.cubin"))

    explained = kgen("explain", "--op", "rmsnorm", "--gpu", "a100", "--problem", PROBLEM,
                     cwd=recorded)
    assert explained.returncode == 0, explained.stderr
    assert "evidence  predicted, not measured" in explained.stdout
    shown = kgen("report", "--problem", "M64", cwd=recorded)
    assert shown.returncode == 0, shown.stderr
    assert "rmsnorm on a100: predicted, not measured" in shown.stdout
    assert kgen("report", "--csv", cwd=recorded).returncode == 2, "there is no measured report"
    emitted = kgen("emit", cwd=recorded)
    assert emitted.returncode == 0, emitted.stdout + emitted.stderr
    assert "origin: predicted" in (library / "tables/a100.yaml").read_text()


def test_measured_problems_are_skipped(tmp_path: Path) -> None:
    table = tmp_path / "generated/kgen_ops/rmsnorm/tables/h200.yaml"
    table.parent.mkdir(parents=True)
    committed = ROOT / "generated/kgen_ops/rmsnorm/tables/h200.yaml"
    table.write_bytes(committed.read_bytes())
    done = kgen("predict", "--op", "rmsnorm", "--gpu", "h200", "--pass", "forward", "--problem",
                "M=8192,N=4096,dtype=bf16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "M8192 N4096 bf16: measured on h200, so nothing is predicted" in done.stdout
    assert table.read_bytes() == committed.read_bytes()


def test_one_model_is_judged_if_it_is_named(recorded: Path) -> None:
    done = kgen("predict", "--judge", "--op", "rmsnorm", "--model", "ridge", cwd=recorded)
    assert done.returncode == 0, done.stderr
    assert "judged rmsnorm forward by ridge" in done.stdout
    assert "trees" not in done.stdout
    assert "mixed" not in done.stdout


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (("--gpu", "a1000"), 2, "unknown GPU 'a1000'"),
    (("--gpu", "auto"), 2, "--gpu auto: a prediction is for a GPU that is named"),
    (("--gpu", "host"), 2, "--gpu host: a prediction is for a GPU that is named"),
    (("--gpu", "a100"), 1, "no search of rmsnorm forward on a GPU is recorded"),
    (("--gpu", "a100", "--judge", "--from", "nowhere"), 1, "no model can be judged"),
])
def test_what_cannot_be_predicted(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = kgen("predict", "--op", "rmsnorm", *FEW, *arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_warm_l2_is_not_predicted(tmp_path: Path) -> None:
    done = kgen("tune", "--op", "rmsnorm", "--gpu", "a100", "--l2", "warm", *FEW, cwd=tmp_path)
    assert done.returncode == 2
    assert "--l2 warm: no NVIDIA A100 80 GB is in this machine" in done.stderr


def test_without_a_compiler_for_the_gpu(recorded: Path) -> None:
    hide = (
        "import kgen.runtime.nvrtc as nvrtc\n"
        "nvrtc.find = lambda: None\n"
        "import sys\nfrom kgen.cli.main import main\n"
        f"sys.exit(main(['predict', '--op', 'rmsnorm', '--gpu', 'a100', *{FEW!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide], cwd=recorded, capture_output=True, text=True, timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "NVRTC" in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_that_measure_still_need_the_gpu(tmp_path: Path) -> None:
    for command in ("verify", "bench", "learn"):
        done = kgen(command, "--op", "rmsnorm", "--gpu", "a100", cwd=tmp_path)
        assert done.returncode == 2
        assert "no NVIDIA A100" in done.stderr


@pytest.mark.parametrize("option", [("--storage", "sqlite:///trials.db"), ("--devices", "0")])
def test_trials_that_do_not_run_are_not_shared(tmp_path: Path, option: tuple[str, str]) -> None:
    done = kgen("tune", "--op", "rmsnorm", "--gpu", "a100", *option, *FEW, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{option[0]} shares measured trials, and no NVIDIA A100 80 GB" in done.stderr
    assert "trials.db" not in done.stderr, "a URL may hold a password"
    assert not list(tmp_path.iterdir())


def test_limits_of_a_search_are_said_to_be_unused(tmp_path: Path) -> None:
    done = kgen("tune", "--op", "rmsnorm", "--gpu", "a100", "--time", "60s", "--trials", "9", *FEW,
                cwd=tmp_path)
    assert done.returncode == 1, "nothing is recorded to learn from"
    assert "a prediction has no search: --trials, --time not used" in done.stdout
