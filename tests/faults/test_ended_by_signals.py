"""SIGTERM and SIGHUP end a tune like Ctrl-C: no folder is left; a message says what is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_tune(tmp_path: Path, number: signal.Signals) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [
        sys.executable, "-m", "kgen", "tune", "--op", "rmsnorm", "--gpu", "host",
        "--problem", "M=64,N=128,dtype=fp32", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    # A child inherits an ignored SIGHUP, as under nohup, and kgen leaves it so: `env` resets it.
    tune = subprocess.Popen(
        ["env", f"--default-signal={number.name.removeprefix('SIG')}", *command], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    deadline = time.monotonic() + 60.0
    while not any(scratch.glob("kgen-host-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert any(scratch.glob("kgen-host-*")), "no build began"
    tune.send_signal(number)
    _, said = tune.communicate(timeout=120.0)
    assert tune.returncode == 128 + number
    assert f"ended by {number.name}; finished trials are in the journal" in said
    assert "Traceback" not in said
    assert not any(scratch.glob("kgen-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_ends_a_judgement_of_models(number: signal.Signals) -> None:
    """One process has no problem left, the other a long one."""
    script = (
        "import os, time\n"
        "from kgen.cli.main import _end_like_interrupted\n"
        "from kgen.predict.judge import _choices_of_all\n"
        "_end_like_interrupted()\n"
        "class Bench:\n"
        "    def choices(self, seconds):\n"
        "        os.write(1, f'{seconds}\\n'.encode())\n"
        "        time.sleep(seconds)\n"
        "try:\n"
        "    _choices_of_all(Bench(), [60.0, 0.0], 2)\n"
        "except KeyboardInterrupt:\n"
        "    print('ended')\n"
    )
    judging = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )
    assert judging.stdout is not None
    assert sorted(judging.stdout.readline() for _ in range(2)) == ["0.0\n", "60.0\n"]
    time.sleep(0.5)
    os.killpg(judging.pid, number)
    told, said = judging.communicate(timeout=10.0)
    assert (told, said) == ("ended\n", "")


def test_a_process_that_starts_during_the_cleanup_can_be_ended() -> None:
    """A compiler's thread may start a process after the signal: SIGTERM must still end that."""
    script = (
        "import os, signal, subprocess, sys\n"
        "from kgen.cli.main import _end_like_interrupted\n"
        "_end_like_interrupted()\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)  # a second one does not interrupt the cleanup\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    child.terminate()\n"
        "    sys.exit(child.wait(20.0) + signal.SIGTERM)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60.0).returncode == 0
