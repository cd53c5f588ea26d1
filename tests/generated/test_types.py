"""Type checkers on a user's file, with the emitted library: mypy and pyright, both strict."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
Errors = dict[int, str]  # line -> message


def mypy(library: Path, file: Path, folder: Path) -> Errors:
    """The errors that mypy finds in a file."""
    # Half a minute to read torch: once per checkout, and not into the cache of other options.
    cache = CHECKOUT / ".mypy_cache" / "user"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent",
         "--no-error-summary", "--cache-dir", str(cache), file.name],
        cwd=file.parent, capture_output=True, text=True, check=False,
        env={"MYPYPATH": str(library), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(\S+):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert {name for name, _, _ in found} <= {file.name}, done.stdout
    return {int(line): text for _, line, text in found}


def pyright(library: Path, file: Path, folder: Path) -> Errors:
    """The errors that pyright finds in a file; by basedpyright, whose wheels bring Node along."""
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed: pip install basedpyright")
    copied = folder / file.name
    copied.write_bytes(file.read_bytes())
    (folder / "pyrightconfig.json").write_text(json.dumps({
        "typeCheckingMode": "strict", "extraPaths": [str(library)],
        "include": [file.name], "pythonVersion": "3.11",
    }))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error",
         "--pythonpath", sys.executable],
        cwd=folder, capture_output=True, text=True, check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    return {found["range"]["start"]["line"] + 1: found["message"]
            for found in report["generalDiagnostics"]}


each_checker = pytest.mark.parametrize("check", [mypy, pyright])
Checker = Callable[[Path, Path, Path], Errors]


@each_checker
def test_a_users_file_is_clean(library_folder: Path, tmp_path: Path, check: Checker) -> None:
    assert check(library_folder, HERE / "user_file.py", tmp_path) == {}


@each_checker
def test_every_mistake_is_found(library_folder: Path, tmp_path: Path, check: Checker) -> None:
    file = HERE / "user_mistakes.py"
    lines = file.read_text().splitlines()
    wanted = {number for number, line in enumerate(lines, 1) if "# mistake:" in line}
    assert len(wanted) == 10
    assert set(check(library_folder, file, tmp_path)) == wanted
