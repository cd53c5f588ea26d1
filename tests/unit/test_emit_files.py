"""Writing the library: all of it or nothing, one writer at a time, errors that say what to do."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kgen.emit.files import locked, write_all
from kgen.emit.state import read_table
from kgen.errors import RecordError, StorageError


def test_only_changed_files_are_written(tmp_path: Path) -> None:
    assert write_all(tmp_path, {"a/b": b"1", "c": b"2"}) == ("a/b", "c")
    assert write_all(tmp_path, {"a/b": b"1", "c": b"3"}) == ("c",)
    assert (tmp_path / "c").read_bytes() == b"3"


def test_a_full_disk_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path, {"a": b"old", "b": b"old"})
    real = tempfile.mkstemp

    def full(**where: Any) -> tuple[int, str]:
        if len(list(tmp_path.glob(".kgen-*"))) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        handle, name = real(**where)
        return handle, str(name)

    monkeypatch.setattr(tempfile, "mkstemp", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_all(tmp_path, {"a": b"new", "b": b"new"})
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"old", "b": b"old"}


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StorageError, match="--out"), locked(tmp_path / "out"):
        pass


def test_writers_take_turns(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from kgen.emit.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    print('in', flush=True)\n"
    )
    with locked(tmp_path):
        other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)],
                                 stdout=subprocess.PIPE, text=True,
                                 cwd=Path(__file__).parents[2])
        time.sleep(0.5)
        assert other.poll() is None
    out, _ = other.communicate(timeout=60)
    assert out == "in\n"


@pytest.mark.parametrize("text", ["{", "schema: 9\nrows: []", "schema: 1\nrows: []", "- 1"])
def test_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "h200.yaml"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"h200\.yaml does not have the format that kgen writes"):
        read_table(path)
