"""The tutorial's blocks, trained: the losses of kgen_ops are those of eager PyTorch."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from model_blocks import Operators, Sizes, rwkv6, transformer
from train_blocks import BLOCKS, Plan, compare, library_operators, main, table_of, train

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "generated"
SCRIPT = ROOT / "docs" / "tutorials" / "training_blocks" / "train_blocks.py"
TINY = Sizes(batch=2, steps=6, channels=16, heads=2, vocabulary=11)
NAMES = ["eager", "kgen_ops", "eager, compiled", "kgen_ops, compiled"]


def plan(device: str, backend: str = "aot_eager") -> Plan:
    return Plan(TINY, 4, torch.device(device), torch.float32, backend)


def agree(block: str, used: Plan) -> None:
    found = compare(BLOCKS[block], library_operators(), used)
    assert found.refused == {}
    assert list(found.runs) == NAMES
    assert max(found.differences.values()) < 1e-3
    for run in found.runs.values():
        assert run.losses[-1] < run.losses[0], "nothing was learnt"
        assert (run.step_ms is None) == (used.device.type == "cpu")
    text = table_of(found).splitlines()
    assert text[0].split() == ["step", *" ".join(NAMES).split()]
    assert [line.split()[0] for line in text[1:5]] == list("1234")
    assert text[5].startswith("largest difference")


@pytest.mark.parametrize("block", BLOCKS)
def test_losses_agree(kgen_ops: ModuleType, block: str) -> None:
    agree(block, plan("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine")
@pytest.mark.parametrize("block", BLOCKS)
def test_losses_agree_on_the_gpu(kgen_ops: ModuleType, block: str) -> None:
    agree(block, plan("cuda", "inductor"))


def test_the_operators_are_those_that_were_given() -> None:
    """Both blocks do call them: a comparison of eager PyTorch with itself would always agree."""
    called: list[str] = []

    def spy(name: str, real: object) -> object:
        def call(*given: object) -> object:
            called.append(name)
            assert callable(real)
            return real(*given)

        return call

    eager = importlib.import_module("eager_operators")
    spies = Operators(spy("rmsnorm", eager.rmsnorm), spy("wkv6", eager.wkv6))  # type: ignore[arg-type]
    for make, expected in ((transformer, ["rmsnorm"] * 3), (rwkv6, ["wkv6"])):
        called.clear()
        make(TINY, spies)(torch.zeros(1, 3, dtype=torch.long))
        assert called == expected


def test_a_missing_pass_is_said(
    kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else there is runs all the same; the block that cannot be trained is not."""
    monkeypatch.setattr(sys.modules["kgen_ops.wkv6"].FORWARD, "gradient", None)
    used = plan("cpu")
    found = compare(rwkv6, library_operators(), used)
    assert list(found.runs) == ["eager", "eager, compiled"]
    assert "kgen tune --op wkv6 --pass backward" in table_of(found)
    assert compare(transformer, library_operators(), used).refused == {}


def test_a_missing_operator_is_said(
    kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(kgen_ops, "wkv6")
    with pytest.raises(NotImplementedError, match=r"no wkv6\n  run: kgen tune --op wkv6"):
        train(rwkv6, library_operators(), plan("cpu"), compiled=False)


def test_the_script(
    kgen_ops: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--device", "cpu", "--steps", "2", "--block", "transformer"]
    calls = tmp_path / "calls.yaml"
    assert main([*arguments, "--backend", "aot_eager", "--capture", str(calls)]) == 0
    printed = capsys.readouterr().out
    # Two steps of two runs: three forward calls each, of which one has no residual.
    captured = yaml.safe_load(calls.read_text())
    counts = {(call["pass"], "residual_dtype=none" in call["problem"]): call["calls"]
              for call in captured["calls"]}
    assert counts == {("forward", False): 4, ("forward", True): 8,
                      ("backward", False): 4, ("backward", True): 8}
    assert captured["steps"] == 4
    assert printed.startswith("transformer block, fp32 on cpu: Sizes(batch=16")
    assert "largest difference" in printed
    with pytest.raises(SystemExit):
        main([*arguments, "--steps", "0"])
    assert "--steps 0: at least 1" in capsys.readouterr().err


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with the committed library, in a process of its own."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "8", *arguments], capture_output=True, text=True,
        check=False, timeout=500, env={**os.environ, "PYTHONPATH": str(LIBRARY)},
    )


def test_a_device_that_was_not_tuned_for_is_said() -> None:
    if (LIBRARY / "kgen_ops" / "rmsnorm" / "tables" / "host.py").exists():
        pytest.skip("`kgen tune --gpu host` has added the CPU to this working tree's library")
    done = run("--device", "cpu", "--block", "transformer", "--backend", "aot_eager")
    assert done.returncode == 1, done.stderr
    assert "kgen_ops was not run:" in done.stdout
    assert "this is a CPU tensor, but only h200 was tuned" in done.stdout
    assert "kgen tune --op rmsnorm --gpu host" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_committed_library_trains(block: str, dtype: str) -> None:
    package = (LIBRARY / "kgen_ops" / "wkv6" / "__init__.py").read_text(encoding="utf-8")
    if block == "rwkv6" and "def wkv6_backward" not in package:
        pytest.skip("the committed library has no wkv6_backward yet")
    done = run("--device", "cuda", "--block", block, "--dtype", dtype)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    (differences,) = [x for x in done.stdout.splitlines() if x.startswith("largest difference")]
    assert max(map(float, differences.split()[2:])) < (1e-2 if dtype == "fp32" else 0.3)
    assert "ms per step" in done.stdout
