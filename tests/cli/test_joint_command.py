"""`kgen tune --storage`, `--devices` and `kgen worker`, as they are typed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from postgres import PASSWORD, USER, postgres_server

from kgen.cli.arguments import devices
from kgen.cli.main import main
from kgen.errors import GpuError
from kgen.journal import Journal
from kgen.launch import select

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = ["--problem", "M=9,N=64,dtype=fp32"]


def test_a_password_on_the_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    storage = f"postgresql://kgen:{PASSWORD}@db/kgen"
    for command in (["tune", "--op", "rmsnorm", "--gpu", "host"], ["worker", "--gpu", "host"]):
        assert main([*command, "--storage", storage]) == 2
        said = capsys.readouterr()
        assert "PGPASSWORD" in said.err
        assert PASSWORD not in said.err + said.out


def test_a_worker_wants_a_storage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KGEN_STORAGE", raising=False)
    assert main(["worker", "--gpu", "host"]) == 2
    assert "add --storage URL" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0,0", "first", "0,,1", "-1"])
def test_devices_are_all_or_a_list(text: str) -> None:
    import argparse

    with pytest.raises(argparse.ArgumentTypeError, match="device numbers"):
        devices(text)
    assert devices("all") == "all"
    assert devices("2,0") == (2, 0)


def test_devices_are_grouped_by_model(monkeypatch: pytest.MonkeyPatch) -> None:
    present = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "Unknown"]
    monkeypatch.setattr(select, "detect_gpus", lambda: present)

    def chosen(name: str, ordinals: list[int] | None) -> dict[str, list[int]]:
        return {gpu.name: found for gpu, found in select.select_devices(name, ordinals).items()}

    assert chosen("auto", None) == {"h200": [0, 2], "h100": [1]}
    assert chosen("h200", None) == {"h200": [0, 2]}
    assert chosen("auto", [2, 1]) == {"h200": [2], "h100": [1]}
    assert chosen("host", [0, 1, 2]) == {"host": [0, 1, 2]}
    assert chosen("host", None) == {"host": [0]}
    for name, ordinals, says in (
        ("h200", [0, 1], "CUDA device 1 is no h200"), ("auto", [7], "no CUDA device 7"),
        ("auto", [3], "no GPU with a profile"), ("a100", None, "no NVIDIA A100"),
    ):
        with pytest.raises(GpuError, match=says):
            chosen(name, ordinals)


def test_two_processes_tune_by_a_database(tmp_path: Path) -> None:
    """The workers of `--devices` join through the storage, like workers on other hosts."""
    with postgres_server() as server:
        server.query("CREATE DATABASE joint")
        url = f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{server.port}/joint"
        command = [
            sys.executable, "-m", "kgen", "tune", "--op", "softmax", "--gpu", "host",
            "--path", str(ROOT / "docs/tutorials/softmax"), *PROBLEM, "--devices", "0,1",
            "--no-peers", "--out", str(tmp_path),
        ]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log,
                env={**os.environ, "KGEN_STORAGE": url, "PYTHONPATH": str(ROOT)},
            )
            lines: set[str] = set()
            while process.poll() is None:
                lines |= _command_lines()
                time.sleep(0.2)
        said = (tmp_path / "log").read_text()
        assert process.returncode == 0, said
        assert "SIGTERM" not in said  # by which the tuner ends its workers
        assert any("kgen worker" in line for line in lines), "no worker was seen"
        assert not any(PASSWORD in line for line in lines)
        members = server.query(
            "SELECT count(*) FROM trials JOIN studies USING (study_id) "
            "WHERE study_name = 'kgen/members' AND state = 'COMPLETE'", "joint")
        assert members == [(2,)]
    reports = tmp_path / "kgen_ops" / "softmax" / "reports"
    trials = [r for r in Journal(reports / "host.trials.jsonl").read() if r.evidence is None]
    assert len({r.config for r in trials}) == 6
    assert set(Counter(r.config for r in trials).values()) == {1}
    assert (tmp_path / "kgen_ops" / "softmax" / "tables" / "host.py").exists()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path


def _command_lines() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended
    return found
