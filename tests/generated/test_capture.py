"""`kgen_ops.capture` records calls, their number and how they are served; it leaves no hook."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml


def rows(m: int, n: int = 16) -> torch.Tensor:
    return torch.randn(m, n)


def by_problem(calls: Any) -> dict[tuple[str, str], Any]:
    """Calls by pass and extents."""
    return {(call.pass_name, call.problem.partition(",dtype")[0]): call for call in calls}


def test_calls_are_counted_by_problem_and_written(kgen_ops: ModuleType, tmp_path: Path) -> None:
    file, w = tmp_path / "calls.yaml", torch.ones(16)
    kgen_ops.rmsnorm(rows(8), w)  # prepared before the capture, which must see it still
    with kgen_ops.capture(file, steps=2) as seen:
        for _ in range(3):
            kgen_ops.rmsnorm(rows(8), w)
        kgen_ops.rmsnorm(rows(5, 24), torch.ones(24))
    found = by_problem(seen.calls)
    tuned, other = found["forward", "M=8,N=16"], found["forward", "M=5,N=24"]
    assert (tuned.operator, tuned.calls, tuned.timed, tuned.step) == ("rmsnorm", 3, 2, "exact")
    assert tuned.median_us > 0
    assert tuned.config.startswith("fixed_row(")
    assert tuned.device == "cpu"
    assert (other.calls, other.timed, other.median_us, other.step) == (1, 0, None, "safe")
    written = yaml.safe_load(file.read_text())
    assert written["steps"] == 2
    assert [(call["problem"], call["calls"], call["median_us"]) for call in written["calls"]] == [
        (tuned.problem, 3, pytest.approx(tuned.median_us, abs=1e-3)), (other.problem, 1, None)]
    assert [path.name for path in tmp_path.iterdir()] == ["calls.yaml"]


def test_autograd_strided_inputs_and_threads_are_seen(
    kgen_ops: ModuleType, tmp_path: Path
) -> None:
    w = torch.ones(16, requires_grad=True)
    with kgen_ops.capture(tmp_path / "calls.yaml") as seen:
        for _ in range(2):
            kgen_ops.rmsnorm(rows(7), w).sum().backward()
        for _ in range(2):
            kgen_ops.rmsnorm(torch.randn(3, 3, 16).transpose(0, 1), w.detach())  # copied first
        threads = [threading.Thread(target=kgen_ops.rmsnorm, args=(rows(6), w.detach()))
                   for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = by_problem(seen.calls)
    assert found["forward", "M=7,N=16"].calls == 2
    assert found["backward", "M=7,N=16"].calls == 2
    assert found["forward", "M=9,N=16"].calls == 2
    assert found["forward", "M=6,N=16"].calls == 4


def test_afterwards_calls_are_fast_again_and_not_seen(
    kgen_ops: ModuleType, extensions: Any, tmp_path: Path
) -> None:
    from kgen_ops.rmsnorm import FORWARD

    x, w = rows(8), torch.ones(16)
    with kgen_ops.capture(tmp_path / "calls.yaml") as seen:
        kgen_ops.rmsnorm(x, w)
        kgen_ops.rmsnorm(x, w)
        assert not FORWARD.fast_paths
    [captured] = seen.calls
    assert not FORWARD.prepared
    for _ in range(3):
        kgen_ops.rmsnorm(x, w)
    assert sum(map(len, FORWARD.fast_paths.values())) == 1
    assert seen.calls == (captured,)


def test_an_exception_leaves_a_file_and_no_observer(kgen_ops: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "calls.yaml"
    with pytest.raises(ZeroDivisionError), kgen_ops.capture(file):  # noqa: PT012
        kgen_ops.rmsnorm(rows(8), torch.ones(16))
        raise ZeroDivisionError
    assert [call["calls"] for call in yaml.safe_load(file.read_text())["calls"]] == [1]
    with kgen_ops.capture(file):
        pass
    assert yaml.safe_load(file.read_text()) == {"format": 1, "steps": 1, "calls": []}


def test_bad_arguments_are_refused_before_the_block(kgen_ops: ModuleType, tmp_path: Path) -> None:
    ran = False
    for path, steps, error, text in [
        (tmp_path / "no" / "calls.yaml", 1, FileNotFoundError,
         r"calls.yaml cannot be written: No such file or directory\n  next: name a file that"),
        (tmp_path / ("x" * 300), 1, OSError, "File name too long\n  next: "),
        (tmp_path / "a\0b", 1, OSError, "cannot be written: embedded null"),
        (None, 1, TypeError, "path=None is no path\n  next: name the file"),
        ("", 1, TypeError, "path='' is no path"),
        (tmp_path, 1, IsADirectoryError, "is a folder"),
        (tmp_path / "calls.yaml", 0, ValueError, "steps=0 is not a whole number > 0"),
        (tmp_path / "calls.yaml", 1.5, ValueError, r"steps=1\.5"),
    ]:
        with pytest.raises(error, match=text), kgen_ops.capture(path, steps=steps):
            ran = True
    assert not ran
    assert not list(tmp_path.iterdir())
    os.mkfifo(tmp_path / "pipe")
    with (pytest.raises(FileExistsError, match="is a device or a pipe"),
          kgen_ops.capture(tmp_path / "pipe")):
        pass
    with (kgen_ops.capture(tmp_path / "calls.yaml"),
          pytest.raises(RuntimeError, match="another capture is on"),
          kgen_ops.capture(tmp_path / "other.yaml")):
        pass


def _call_and_remove(kgen_ops: ModuleType, x: torch.Tensor, folder: Path) -> None:
    kgen_ops.rmsnorm(x)
    folder.rmdir()


def test_calls_remain_where_the_file_cannot_be_written(
    kgen_ops: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    x = torch.randn(2, 16)
    with (pytest.raises(FileNotFoundError, match=r"next: .*; the capture still has the calls"),
          kgen_ops.capture(folder / "calls.yaml") as seen):
        _call_and_remove(kgen_ops, x, folder)
    assert [call.calls for call in seen.calls] == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine")
def test_gpu_launches_are_timed_by_events(tmp_path: Path) -> None:
    """With the committed library, as `test_gpu.py` has it."""
    import subprocess
    import sys

    script = """
import torch, kgen_ops
x, w = torch.randn(4096, 4096, device="cuda"), torch.ones(4096, device="cuda")
with kgen_ops.capture("calls.yaml") as seen:
    for _ in range(200):
        kgen_ops.rmsnorm(x, w)
[call] = seen.calls
assert call.calls == 200 and call.timed == 199, call
assert 10 < call.median_us < 2000, call
"""
    generated = Path(__file__).resolve().parents[2] / "generated"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True,
                          text=True, check=False, env={"PYTHONPATH": str(generated)})
    assert done.returncode == 0, done.stderr
