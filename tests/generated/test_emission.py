"""What emit writes: the same bytes twice, beside what others wrote, importable by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.emit import Emitted, Winner
from kgen.errors import RecordError

EmitInto = Callable[[Path, Sequence[Winner]], Emitted]
MakeWinner = Callable[..., Winner]

ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"kgen", "jinja2", "optuna", "yaml"}:
            raise ImportError(f"{name} is blocked")

import torch
sys.meta_path.insert(0, Blocked())
"""


def contents(folder: Path) -> dict[str, bytes]:
    """All files by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*")
            if p.is_file() and "__pycache__" not in p.parts}


def run(script: str, library: Path, **environment: str) -> str:
    """Run a script that can import the library, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(library), **environment}, cwd=library,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_same_values_give_the_same_bytes(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner
) -> None:
    winners = [make_winner("M=8,N=16,dtype=fp32"), make_winner("M=9,N=32,dtype=bf16")]
    emit_into(tmp_path / "a", winners)
    emit_into(tmp_path / "b", winners[::-1])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert emit_into(tmp_path / "a", winners).changed == ()


def test_problems_and_gpus_add_up(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner
) -> None:
    host = make_winner("M=8,N=16,dtype=fp32")
    wide = make_winner("M=8,N=64,dtype=fp32")
    h200 = make_winner("M=8192,N=4096,dtype=bf16", gpu="h200")
    emit_into(tmp_path / "a", [host])
    before = contents(tmp_path / "a" / "kgen_ops" / "rmsnorm" / "tables")
    emitted = emit_into(tmp_path / "a", [h200])
    after = contents(tmp_path / "a" / "kgen_ops" / "rmsnorm" / "tables")
    assert before["host.py"] == after["host.py"]
    assert not any(name.endswith("host.py") for name in emitted.changed)
    emit_into(tmp_path / "a", [wide])
    emit_into(tmp_path / "b", [wide, h200, host])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    cubins = list((tmp_path / "a").rglob("*.cubin"))
    assert [p.name for p in cubins] == [f"{h200.rendered.digest}.sm_90a.cubin"]


def test_a_better_winner_replaces_and_its_loser_goes(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner
) -> None:
    old = make_winner("M=8,N=16,dtype=fp32")
    source = old.rendered.source + "// better\n"
    new = replace(old, rendered=replace(old.rendered, source=source, digest="0123456789ab"))
    emit_into(tmp_path, [old])
    emitted = emit_into(tmp_path, [new])
    assert emitted.removed == (f"kgen_ops/rmsnorm/kernels/{old.rendered.digest}.cu",)
    table = (tmp_path / "kgen_ops/rmsnorm/tables/host.py").read_text()
    assert "0123456789ab" in table
    assert old.rendered.digest not in table


def test_an_untimed_winner_is_refused(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner
) -> None:
    winner = make_winner("M=8,N=16,dtype=fp32")
    untimed = replace(winner, record=replace(winner.record, timing=None))
    with pytest.raises(RecordError, match="has no timing"):
        emit_into(tmp_path, [untimed])
    assert contents(tmp_path) == {}


def test_generated_code_is_clean(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner
) -> None:
    emit_into(tmp_path, [make_winner("M=8,N=16,dtype=fp32"),
                         make_winner("M=8192,N=4096,dtype=bf16", gpu="h200")])
    for command in (["ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), "."],
                    ["mypy", "--no-error-summary", "--config-file", str(ROOT / "pyproject.toml"),
                     "--cache-dir", str(ROOT / ".mypy_cache" / "emitted"), "--no-warn-return-any",
                     "kgen_ops"]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, check=False,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_needs_torch_alone(library_folder: Path, tmp_path: Path) -> None:
    script = BLOCKED + (
        "import kgen_ops\n"
        "assert not torch.cuda.is_initialized()\n"
        "y = kgen_ops.rmsnorm(torch.ones(8, 16), torch.full((16,), 2.0))\n"
        "assert (y - 2.0).abs().max() < 1e-5\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('kgen', 'jinja2', 'optuna')))\n"
    )
    assert run(script, library_folder, KGEN_CACHE_DIR=str(tmp_path / "cache")) == "[]\n"


def test_import_is_light(library_folder: Path) -> None:
    script = BLOCKED + (
        "before = set(sys.modules)\n"
        "import kgen_ops\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    imported = run(script, library_folder).split()
    ours = {name.removeprefix("kgen_ops._runtime.") for name in imported}
    assert not ours & {"cuda", "nvrtc", "host", "device", "launcher"}
    assert not any(".tables" in name or ".safe" in name for name in imported)
    operators = [path for path in (library_folder / "kgen_ops").iterdir() if path.name[0] != "_"
                 and path.is_dir()]
    assert len(imported) <= 24 + len(operators), imported  # a module for each operator


@pytest.mark.quick
def test_it_installs(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner
) -> None:
    pytest.importorskip("setuptools")
    source, target = tmp_path / "source", tmp_path / "target"
    emit_into(source, [make_winner("M=8,N=16,dtype=fp32")])
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps",
         "--no-index", "--target", str(target), str(source)],
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    installed = {name for name in contents(target) if name.startswith("kgen_ops/")}
    wanted = {name for name in contents(source) if name.startswith("kgen_ops/")}
    assert wanted <= installed
    script = BLOCKED + (
        "import kgen_ops\n"
        "print(kgen_ops.explain('rmsnorm', M=8, N=16, dtype='fp32', device='cpu').step)\n"
        "from kgen_ops._runtime.extension import EXTENSIONS, extension\n"
        "print(all(extension(name) for name in EXTENSIONS))\n"
    )
    assert run(script, target).split()[0] == "exact"


def test_a_forward_pass_alone_says_what_to_run_for_gradients(
    tmp_path: Path, emit_into: EmitInto
) -> None:
    """Never dropped silently: eager, through the dispatcher, compiled, and recorded by torch.func.
    """
    emit_into(tmp_path, [])
    script = """
import torch, kgen_ops
x, w = torch.ones(8, 16), torch.ones(16, requires_grad=True)
compiled = torch.compile(lambda x, w: kgen_ops.rmsnorm(x, w), fullgraph=True, backend="aot_eager")
loss = lambda w: kgen_ops.rmsnorm(x, w).sum()
calls = (lambda: kgen_ops.rmsnorm(x, w), lambda: torch.ops.kgen_ops.rmsnorm(x, w),
         lambda: compiled(x, w), lambda: torch.func.grad(loss)(w.detach()))
for call in calls:
    try:
        call()
    except Exception as problem:
        assert "the library has no rmsnorm_backward" in str(problem), problem
        assert "kgen tune --op rmsnorm --pass backward --gpu auto" in str(problem), problem
        print("refused")
with torch.no_grad():
    meta = kgen_ops.rmsnorm(x.to("meta"), w.to("meta"))
print(meta.requires_grad)
"""
    assert run(script, tmp_path).split() == ["refused"] * 4 + ["False"]
