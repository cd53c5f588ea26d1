"""The families of the committed library: for a row's own problem they give the row's own kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parents[1] / "generated" / "kgen_ops"
OPERATORS = sorted({path.parents[1].name for path in LIBRARY.glob("*/tables/*.yaml")})


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_instance_for_a_rows_problem_is_the_rows_kernel(operator: str) -> None:
    done = subprocess.run([sys.executable, HERE / "instances_of_rows.py", operator],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tables = (LIBRARY / operator / "tables").glob("*.yaml")
    rows = sum(len(yaml.load(path.read_text(), yaml.CSafeLoader)["rows"]) for path in tables)
    assert int(done.stdout.split()[0]) == rows > 0
