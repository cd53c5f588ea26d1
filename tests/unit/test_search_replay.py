"""The replay of searches over recorded spaces, on a small space."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HAS_KERNEL_TUNER = importlib.util.find_spec("kernel_tuner") is not None


@pytest.fixture
def spaces(tmp_path: Path) -> Path:
    """A folder with a cache of 63 configs; the best is x=5, y=3, and x=0 fails."""
    cache = {}
    for x in range(7):
        for y in range(9):
            us = 1.0 + (x - 5) ** 2 + (y - 3) ** 2
            time = us if x else "CompilationFailedConfig"
            cache[f"{x},{y}"] = {"x": x, "y": y, "time": time}
    recorded = {
        "device_name": "gpu", "kernel_name": "k", "problem_size": [64], "objective": "time",
        "tune_params_keys": ["x", "y"], "cache": cache,
        "tune_params": {"x": list(range(7)), "y": list(range(9))},
    }  # fmt: skip
    (tmp_path / "small.json").write_text(json.dumps(recorded))
    return tmp_path


def replay(spaces: Path, methods: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "benchmarks" / "search_replay.py"
    options = ["--methods", methods, "--seeds", "2", "--at", "20", "63", "--jobs", "1"]
    return subprocess.run(
        [sys.executable, str(script), "--spaces", str(spaces), "--batch", "4", *options],
        capture_output=True, text=True,
    )  # fmt: skip


def test_every_method_is_reported_with_its_error(spaces: Path) -> None:
    done = replay(spaces, "random,kgen" + (",kt:genetic_algorithm" if HAS_KERNEL_TUNER else ""))
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)["spaces"]["small"]
    for name in ("random", "kgen_batch4"):
        assert found[name]["ratio"][1] == 1.0  # all 63 configs are tried
        assert found[name]["error"][1] == 0.0
    assert found["kgen_batch4"]["ratio"][0] <= found["random"]["ratio"][0]
    if HAS_KERNEL_TUNER:
        assert found["kt:genetic_algorithm"]["ratio"][1] >= 1.0


@pytest.mark.skipif(HAS_KERNEL_TUNER, reason="Kernel Tuner is installed")
def test_without_kernel_tuner_the_next_step_is_named(spaces: Path) -> None:
    done = replay(spaces, "kgen,kt")
    assert done.returncode == 1
    assert "--methods kt: Kernel Tuner cannot be imported" in done.stderr
    assert "pip install 'kgen[benchmark]'" in done.stderr


def test_an_unknown_method_is_refused(spaces: Path) -> None:
    done = replay(spaces, "kgen,best")
    assert done.returncode == 1
    assert "--methods: unknown method 'best'; known: random, tpe, kgen, kt, kt:STRATEGY" in (
        done.stderr
    )
