"""The library loads what kgen wrote and refuses the rest; its selftest says so beforehand."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from kgen.emit import Emitted, Winner
from kgen.runtime import nvrtc
from kgen.runtime.integrity import (
    MANIFEST,
    IntegrityError,
    checked_bytes,
    checked_cubin,
    content_hash,
    cubin_sm,
    damages,
    listed_files,
    manifest_text,
)
from kgen.runtime.rows import FORMAT

EmitInto = Callable[[Path, Sequence[Winner]], Emitted]
MakeWinner = Callable[..., Winner]

PROBLEM = "M=8,N=16,dtype=fp32"
EXPLAIN = ("import kgen_ops\n"
           "print(kgen_ops.explain('rmsnorm', M=8, N=16, dtype='fp32', device='cpu').step)\n")


@pytest.fixture
def library(tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner) -> Path:
    """The package of a library with one row for the host."""
    emit_into(tmp_path / "lib", [make_winner(PROBLEM)])
    return tmp_path / "lib" / "kgen_ops"


def listed_anew(library: Path) -> None:
    """Write the list for what lies there now, as a careful meddler would."""
    text = manifest_text({name: (library / name).read_bytes() for name in listed_files(library)})
    (library / MANIFEST).write_text(text)


def kernel(library: Path, make_winner: MakeWinner) -> Path:
    """The source of the measured row."""
    return library / "rmsnorm" / "kernels" / f"{make_winner(PROBLEM).rendered.digest}.cu"


def run(library: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the library; it has a process of its own, as only one fits into one."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "PYTHONPATH": str(library.parent), **env}, cwd=library.parent,
    )


def test_the_list_names_every_file(library: Path) -> None:
    lines = (library / MANIFEST).read_text().splitlines()
    found = {str(p.relative_to(library)) for p in library.rglob("*") if p.is_file()}
    assert {line[66:] for line in lines} == found - {MANIFEST}
    for line in lines:
        assert hashlib.sha256((library / line[66:]).read_bytes()).hexdigest() == line[:64]
    assert content_hash(library) == hashlib.sha256((library / MANIFEST).read_bytes()).hexdigest()
    assert damages(library) == []


def test_changed_missing_and_strange_files(library: Path, make_winner: MakeWinner) -> None:
    path = kernel(library, make_winner)
    whole = path.read_bytes()
    assert checked_bytes(library, path) == whole
    path.write_bytes(whole[:-1])
    with pytest.raises(IntegrityError, match=rf"{path.name}: it was changed.*\n  next: install"):
        checked_bytes(library, path)
    path.unlink()
    with pytest.raises(IntegrityError, match="cannot be read"):
        checked_bytes(library, path)
    strange = library / "_include" / "kgen" / "new.cuh"
    strange.write_text("#pragma once\n")
    with pytest.raises(IntegrityError, match="is not on the list"):
        checked_bytes(library, strange)
    kernels = f"rmsnorm/kernels/{path.name}"
    assert damages(library) == ["_include/kgen/new.cuh is not on the list", f"{kernels} is missing"]


def test_a_later_emission_is_noticed(
    library: Path, emit_into: EmitInto, make_winner: MakeWinner
) -> None:
    checked_bytes(library, kernel(library, make_winner))
    later = make_winner("M=8,N=32,dtype=fp32")
    emit_into(library.parent, [later])
    path = library / "rmsnorm" / "kernels" / f"{later.rendered.digest}.cu"
    assert checked_bytes(library, path) == later.rendered.source.encode()


def test_an_interrupted_emission_leaves_what_loads(
    library: Path, emit_into: EmitInto, make_winner: MakeWinner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(root: Path) -> dict[str, bytes]:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("kgen.emit.emit"), "package_files", interrupted)
    table = library / "rmsnorm" / "tables" / "host.py"
    before = table.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        emit_into(library.parent, [make_winner("M=9,N=16,dtype=fp32")])
    assert checked_bytes(library, table) != before
    assert damages(library) == []


@pytest.mark.skipif(nvrtc.find() is None, reason="no NVRTC")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_the_architecture_of_a_cubin(library: Path, arch: str) -> None:
    image, _ = nvrtc.compile_cubin('extern "C" __global__ void k() {}', "k.cu", arch)
    assert cubin_sm(image) == int(arch.strip("sm_a"))
    right = library / "rmsnorm" / "kernels" / f"abc.{arch}.cubin"
    wrong = right.with_name("abc.sm_75.cubin")
    right.write_bytes(image)
    wrong.write_bytes(image)
    cut = right.with_name("abd.sm_75.cubin")
    cut.write_bytes(image[:40])
    listed_anew(library)
    assert checked_cubin(library, right) == image
    with pytest.raises(IntegrityError, match=f"holds code for {arch.rstrip('a')}, not for sm_75"):
        checked_cubin(library, wrong)
    with pytest.raises(IntegrityError, match="is not a cubin"):
        checked_cubin(library, cut)


def test_tables_are_checked(library: Path) -> None:
    assert run(library, "-c", EXPLAIN).stdout == "exact\n"
    table = library / "rmsnorm" / "tables" / "host.py"
    text = table.read_text()
    table.write_text(text.replace("M >= 1", "M >= 2"))
    done = run(library, "-c", EXPLAIN)
    assert "IntegrityError: refusing" in done.stderr
    assert "host.py: it was changed" in done.stderr
    table.write_text(text.replace(f"FORMAT = {FORMAT}", f"FORMAT = {FORMAT + 1}"))
    listed_anew(library)
    done = run(library, "-c", EXPLAIN)
    assert f"is of format {FORMAT + 1}, but this library reads format {FORMAT}" in done.stderr
    table.write_text(text)
    (library / MANIFEST).unlink()
    done = run(library, "-c", EXPLAIN)
    assert "SHA256SUMS: it cannot be read: No such file" in done.stderr


def test_importing_reads_no_list(library: Path) -> None:
    (library / MANIFEST).unlink()
    done = run(library, "-c", "import kgen_ops; print(kgen_ops.__version__)")
    assert done.returncode == 0, done.stderr


def test_selftest(library: Path, make_winner: MakeWinner, tmp_path: Path) -> None:
    env = {"KGEN_CACHE_DIR": str(tmp_path / "cache")}
    arguments = ("-m", "kgen_ops.selftest", "--device")
    done = run(library, *arguments, "cpu", "-v", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "files: exactly those that SHA256SUMS lists" in done.stdout
    assert "rmsnorm on host: 1 rows, each serves its own problem" in done.stdout
    assert "rmsnorm on cpu: 1 rows agree with the safe kernels" in done.stdout
    assert "M=8,N=16" in done.stdout

    source = kernel(library, make_winner)
    text = source.read_text()
    source.write_text(text.replace("* scale;", "* scale * 1.5f;"))
    done = run(library, *arguments, "none", **env)
    assert done.returncode == 1
    assert f"{source.name} was changed" in done.stdout
    listed_anew(library)
    done = run(library, *arguments, "cpu", **env)
    assert done.returncode == 1, done.stdout
    assert "differs from the safe kernel by 5.0" in done.stdout
    assert "1 failed" in done.stdout

    safe = library / "rmsnorm" / "safe.py"
    safe.write_text(safe.read_text().replace(f"FORMAT = {FORMAT}", "FORMAT = 0"))
    listed_anew(library)
    done = run(library, *arguments, "none", **env)
    assert done.returncode == 1
    assert "safe.py: it is of format 0" in done.stdout


def test_selftest_of_real_operators(
    kgen_ops: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The inputs that the selftest makes up suit them: finite results, shapes that fit."""
    selftest = importlib.import_module("kgen_ops._runtime.selftest")
    code = selftest.main(["--device", "cpu"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    for function in ("wkv6", "wkv6_backward", "linear_attention", "linear_attention_backward"):
        assert f"ok    {function} on cpu: 1 rows agree with the safe kernels" in printed
