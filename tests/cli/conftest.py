"""A tuned library, made once for all tests of commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tuned_rmsnorm import TINY, TRIALS, tune_arguments


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rmsnorm tuned for `TINY`.

    Most of the time goes into certifying the safe variant for every combination of dtypes. Tunes in
    copies of the folder reuse those certificates.
    """
    folder = tmp_path_factory.mktemp("tuned")
    done = subprocess.run(
        [sys.executable, "-m", "kgen", *tune_arguments(TINY, TRIALS)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder
