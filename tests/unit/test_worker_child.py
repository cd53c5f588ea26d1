"""The output of a worker, and its start and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kgen.catalogue import profile_named
from kgen.trial.child import Child
from kgen.worker import Setup

SETUP = Setup("rmsnorm", (), profile_named("host"), 0, 0)


def test_a_child_waits_for_permission_and_ends_when_told() -> None:
    child = Child(SETUP)
    assert not child.poll(0.2)  # it opens no device by itself
    child.pipe.send("go")
    assert child.poll(60.0)
    assert child.pipe.recv() == "ready"
    child.dismiss()
    assert child._process.exitcode == 0


def test_a_child_that_is_dismissed_unused_ends_too() -> None:
    child = Child(SETUP)
    child.dismiss()
    assert not child._process.is_alive()


@pytest.mark.parametrize("folder_bytes", [60, 90, 190])
def test_a_child_starts_with_a_long_path_of_the_temporary_folder(
    folder_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of the host's workers has a socket there, whose path has 107 bytes at most."""
    folder = tmp_path / ("x" * (folder_bytes - len(str(tmp_path)) - 1))
    folder.mkdir(exist_ok=True)
    program = (
        "from test_worker_child import SETUP, Child\n"
        "if __name__ == '__main__':\n"
        "    child = Child(SETUP)\n"
        "    child.pipe.send('go')\n"
        "    assert child.poll(60.0)\n"
        "    assert child.pipe.recv() == 'ready'\n"
        "    child.dismiss()\n"
    )
    script = tmp_path / "start.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120.0,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.returncode == 0, done.stderr


def test_how_a_child_ended_is_told_with_its_last_words() -> None:
    child = Child(Setup("no_such_operator", (), profile_named("host"), 0, 0))
    child.pipe.send("go")
    assert child.poll(60.0)
    failure = child.pipe.recv()
    assert "no_such_operator" in failure.message
    assert "exit code 0" in child.reap()


def test_ctrl_c_does_not_reach_a_child(capfd: pytest.CaptureFixture[str]) -> None:
    """It is for the parent, also while the child still loads its modules."""
    child = Child(SETUP)
    assert child.pid is not None
    for _ in range(50):
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.02)
    child.pipe.send("go")
    assert child.poll(60.0)
    assert child.pipe.recv() == "ready"
    child.dismiss()
    assert child._process.exitcode == 0
    assert capfd.readouterr().err == ""
