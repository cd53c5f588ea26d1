"""No problem of a population is left to the safe kernel of the committed library on an H200."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kgen.catalogue import open_catalogue

LIBRARY = Path(__file__).resolve().parents[2] / "generated"


@pytest.mark.parametrize("operator", open_catalogue().names)
def test_no_problem_is_left_to_the_safe_kernel(operator: str) -> None:
    # In a process of its own: only one library fits into one.
    done = subprocess.run(
        [sys.executable, "-m", "kgen", "coverage", "--op", operator, "--gpu", "h200", "--steps",
         "--out", LIBRARY],
        capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    served = [line for line in done.stdout.splitlines()
              if line.startswith(("forward ", "backward "))]
    assert len(served) >= 10
    assert not [line for line in served if line.endswith((": safe", ": none"))]
