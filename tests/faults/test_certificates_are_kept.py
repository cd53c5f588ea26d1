"""A repeated tune proves a kernel again if its earlier proof was by another definition."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from planting import plant, records

FOLDER = Path(__file__).parent


def tuned(folder: Path, mine: Path) -> int:
    """Tune in a process of its own; the number of certificates in the journal after it."""
    command = [sys.executable, str(FOLDER / "killed_tuner.py"), str(folder), str(mine), "host"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return sum(record.evidence is not None for record in records(folder))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_another_definition_is_proven_again(tmp_path: Path) -> None:
    """The same command without a change proves nothing: `tests/cli/test_cli.py`."""
    mine = plant(tmp_path, ["none"])
    # The finalist's, the same with its host run, the safe kernel's.
    assert tuned(tmp_path, mine) == 3
    operator = mine / "operators" / "planted.py"
    edit(operator, "(x.flip(-1) + x.sum(dim=-1, keepdim=True))}", "(x.flip(-1) + x.sum(-1, True))}")
    assert tuned(tmp_path, mine) == 6
