"""Families of the committed library beside its safe kernels; on the CPU as an H200 gets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kgen.catalogue import open_catalogue

HERE = Path(__file__).resolve().parent
OPERATORS = sorted(
    path.parent.name for path in (HERE.parents[1] / "generated" / "kgen_ops").glob("*/safe.py"))

SIGNATURES = {name: open_catalogue().operator(name).signature for name in OPERATORS}
each_pass = pytest.mark.parametrize(
    ("operator", "pass_name"),
    [(name, each.name) for name, signature in SIGNATURES.items() for each in signature.passes])


def run(operator: str, pass_name: str, count: int, device: str) -> None:
    """Run the script, which exits with 1 if a family and the safe kernel disagree."""
    done = subprocess.run(
        [sys.executable, HERE / "families_beside_safe.py", operator, pass_name, str(count), device],
        capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 1 <= done.stdout.count("\n") <= count


@each_pass
def test_a_family_agrees_with_the_safe_kernel(operator: str, pass_name: str) -> None:
    run(operator, pass_name, 1, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine")
@each_pass
def test_families_agree_on_the_gpu(operator: str, pass_name: str) -> None:
    run(operator, pass_name, 12, "cuda")
