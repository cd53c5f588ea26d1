"""Calls outside all populations: the committed library serves none by the safe kernel on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kgen.catalogue import open_catalogue

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "legal_calls.py"


def served(operator: str, count: int, library: Path) -> subprocess.CompletedProcess[str]:
    # In a process of its own: only one library fits into one.
    return subprocess.run(
        [sys.executable, SCRIPT, "--op", operator, "--count", str(count), "--gpu", "h200,a100",
         "--library", library],
        capture_output=True, text=True, check=False)


@pytest.mark.parametrize("operator", open_catalogue().names)
def test_no_legal_call_is_left_to_the_safe_kernel(operator: str) -> None:
    done = served(operator, 30, ROOT / "generated")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert sum(counts) >= 2 * 30
