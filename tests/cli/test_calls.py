"""From the calls of a program to rows for them: `kgen_ops.capture`, then `kgen tune --calls`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tuned_rmsnorm import TRIALS

CAPTURED = """
import torch, kgen_ops

w = torch.ones(128)
with kgen_ops.capture("calls.yaml", steps=2):
    for _ in range(2):
        for m in (33, 35, 35, 35):
            kgen_ops.rmsnorm(torch.randn(m, 128), w)
    kgen_ops.rmsnorm(torch.randn(36, 128), w)
print(kgen_ops.explain("rmsnorm", M=35, N=128, dtype="fp32").step)
"""
PRINT_STEP = """
import kgen_ops
print(kgen_ops.explain("rmsnorm", M=35, N=128, dtype="fp32").step)
"""


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False,
        timeout=480,
        env={**os.environ, "PYTHONPATH": f"generated:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_tune_for_captured_calls_gives_them_rows_and_says_what_it_saves(
    tuned: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tuned, folder)  # its safe variant is certified
    assert run(folder, "-c", CAPTURED) == "nearest\n"
    printed = run(folder, "-m", "kgen", "tune", "--calls", "calls.yaml", "--gpu", "host",
                  "--no-peers", "--trials", str(TRIALS))
    assert run(folder, "-c", PRINT_STEP) == "exact\n"
    table = printed[printed.index("calls.yaml: 2 steps captured"):].splitlines()
    names = [line.strip() for line in table if line.startswith("  rmsnorm")]
    assert names[:2] == ["rmsnorm forward M35 N128 fp32", "rmsnorm forward M33 N128 fp32"]
    assert names[2] == ("rmsnorm forward M36 N128 fp32: 1 calls; none was timed, as each problem's "
                        "first call is not")
    assert table[2].startswith("    6 calls by nearest of ")
    assert table[4].startswith("    2 calls by exact of ")
    assert " us a step saved" in printed
