"""`kgen package`: a wheel that is the same twice, installs anywhere, and holds what it should."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from family_library import host_library

from kgen.assets import include_dir, licence_file
from kgen.emit import Emitted, Winner
from kgen.errors import CatalogueError, OptionError, RecordError, StorageError
from kgen.package import ArchCubins, Packaged, package
from kgen.runtime import nvrtc
from kgen.runtime.integrity import cubin_sm

pytestmark = pytest.mark.skipif(nvrtc.find() is None, reason="no NVRTC")

EmitInto = Callable[[Path, Sequence[Winner]], Emitted]
MakeWinner = Callable[..., Winner]

ARCHS = ("sm_80", "sm_90a")


@pytest.fixture(scope="module")
def library(
    tmp_path_factory: pytest.TempPathFactory, emit_into: EmitInto, make_winner: MakeWinner
) -> Path:
    """A library with a row for Hopper and one for the host."""
    folder = tmp_path_factory.mktemp("library")
    emit_into(folder, [make_winner("M=64,N=512,dtype=bf16", gpu="h200", compiled=True),
                       make_winner("M=8,N=16,dtype=fp32")])
    return folder


@pytest.fixture(scope="module")
def packaged(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Packaged:
    """The wheel of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return package(library, ARCHS, tmp_path_factory.mktemp("wheel"))


def test_the_same_bytes(
    packaged: Packaged, tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a library in another folder, with nothing in the cache."""
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    emit_into(tmp_path / "lib", [make_winner("M=8,N=16,dtype=fp32")])
    emit_into(tmp_path / "lib", [make_winner("M=64,N=512,dtype=bf16", gpu="h200", compiled=True)])
    again = package(tmp_path / "lib", ARCHS, tmp_path / "wheel")
    assert again.path.name == packaged.path.name
    assert again.path.read_bytes() == packaged.path.read_bytes()


def test_what_is_in_it(packaged: Packaged, library: Path, make_winner: MakeWinner) -> None:
    assert packaged.version == f"0.1.0+sha{packaged.content[:12]}"
    measured = make_winner("M=64,N=512,dtype=bf16", gpu="h200").rendered.digest
    with zipfile.ZipFile(packaged.path) as wheel:
        assert {i.date_time for i in wheel.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {i.external_attr >> 16 for i in wheel.infolist()} == {0o100644}
        files = {name: wheel.read(name) for name in wheel.namelist()}
    (metadata,) = [data for name, data in files.items() if name.endswith("/METADATA")]
    assert b"License-Expression: Apache-2.0\nLicense-File: kgen_ops/LICENSE\n" in metadata
    licence = f"kgen_ops-{packaged.version}.dist-info/licenses/kgen_ops/LICENSE"
    assert files[licence] == files["kgen_ops/LICENSE"] == licence_file().read_bytes()
    (record,) = [name for name in files if name.endswith("/RECORD")]
    rows = list(csv.reader(io.StringIO(files[record].decode())))
    assert [row[0] for row in rows] == list(files)
    for name, digest, size in rows[:-1]:
        found = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode()
        assert (digest, size) == (f"sha256={found.rstrip('=')}", str(len(files[name])))
    assert rows[-1] == [record, "", ""]
    listing = files["kgen_ops/SHA256SUMS"]
    assert hashlib.sha256(listing).hexdigest() == packaged.content
    named = {f"kgen_ops/{line[66:]}" for line in listing.decode().splitlines()}
    assert named == {name for name in files if name.startswith("kgen_ops/")} - {
        "kgen_ops/SHA256SUMS"}
    cubins = {name.split("/")[-1]: files[name] for name in files if name.endswith(".cubin")}
    for name, image in cubins.items():
        assert cubin_sm(image) == int(name.split(".")[1].strip("sm_a"))
    safe = [count.compiled for count in packaged.cubins]
    assert packaged.cubins == (ArchCubins("sm_80", 0, safe[0]), ArchCubins("sm_90a", 1, safe[0]))
    assert len(cubins) == sum(safe) + 1
    # The row's cubin is the one that was measured; no other architecture has use for its kernel.
    kept = library / f"kgen_ops/rmsnorm/kernels/{measured}.sm_90a.cubin"
    assert cubins[kept.name] == kept.read_bytes()
    assert f"{measured}.sm_80.cubin" not in cubins


def test_it_installs_and_tests_itself(packaged: Packaged, tmp_path: Path) -> None:
    target = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--target", str(target), str(packaged.path)],
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    script = (
        "import sys, runpy, importlib.metadata\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'kgen', 'jinja2', 'optuna', 'yaml'}:\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "import torch\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "print(importlib.metadata.version('kgen-ops'))\n"
        "print(importlib.metadata.requires('kgen-ops'))\n"
        "sys.argv[1:] = ['--device', 'none']\n"
        "runpy.run_module('kgen_ops.selftest', run_name='__main__')\n"
    )

    def selftest() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False,
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(target)},
        )

    done = selftest()
    assert done.returncode == 0, done.stdout + done.stderr
    assert packaged.version in done.stdout
    assert "torch>=" in done.stdout
    assert f"content {packaged.content[:12]}" in done.stdout
    assert "rmsnorm on h200: 1 rows, each serves its own problem; cubins: 1 of 1 for sm_90a" \
        in done.stdout

    (metadata,) = target.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("+sha", "+sha0"))
    done = selftest()
    assert done.returncode == 1
    assert "the installed version is 0.1.0+sha0" in done.stdout


def test_kernels_of_a_population_are_compiled_ahead(tmp_path: Path) -> None:
    """They are those that the library renders at a first call, which then needs no compiler."""
    library = host_library(tmp_path / "library", include_dir(), ["rmsnorm"])
    ours = tmp_path / "ours.yaml"
    ours.write_text(
        "doc: One model.\nmodels:\n  ours:\n    - {name: A, source: here, N: 96}\ncalls:\n"
        "  - {operator: rmsnorm, models: ours, passes: forward, M: [5, 7], dtype: fp32}\n")
    script = f"""
import sys
from pathlib import Path
import torch
from kgen.cli.main import main

assert main(["package", "--from", {str(library)!r}, "--arch", "sm_80,sm_90a",
             "--population", {str(ours)!r}, "--wheel", {str(tmp_path)!r}]) == 0
from kgen.catalogue import profile_named
from kgen.emit import LoadedLibrary
from kgen.model.problem import parse_problem
from kgen.operators.rmsnorm import OPERATOR
problem = parse_problem("M=5,N=96,dtype=fp32", OPERATOR.signature)
with LoadedLibrary.open(Path({str(library)!r}), "--from") as loaded:
    served = loaded.served("rmsnorm", "forward", problem, profile_named("a100"))
    assert served.step == "family"
    print("stem", loaded.rendered("rmsnorm", "forward", problem, served.config)[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert "2 of them for" in done.stdout or "1 of them for" in done.stdout
    stem = done.stdout.split("stem ")[1].strip()
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
    first_call = f"""
from pathlib import Path
import kgen_ops
from kgen_ops._runtime import cuda, device, nvrtc

class A100:
    compute_capability = (8, 0)

class Driver:
    def device(self, ordinal):
        return A100

def refuse():
    raise AssertionError("a compiler was asked for")

cuda.driver, nvrtc.nvrtc = Driver, refuse
root = Path(kgen_ops.__path__[0])
image = device._cubin(root, root / "rmsnorm/kernels/{stem}.cu", 0, b"rendered text")
print(len(image))
"""
    done = subprocess.run([sys.executable, "-c", first_call], capture_output=True, text=True,
                          check=False, cwd=tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000


def test_refusals(
    library: Path, tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner
) -> None:
    wheels = tmp_path / "wheels"
    with pytest.raises(OptionError, match=r"'sm_80a' is not an architecture"):
        package(library, ["sm_80a"], wheels)
    with pytest.raises(OptionError, match=r"(?s)'sm_90', but.*tuned.*\n  next: --arch sm_90a"):
        package(library, ["sm_90"], wheels)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"--wheel .*file/wheels: a wheel cannot be written"):
        package(library, ["sm_80"], tmp_path / "file" / "wheels")
    with pytest.raises(CatalogueError, match="no library in"):
        package(tmp_path, ["sm_80"], wheels)
    # A cubin that says it is for Hopper and is not one at all.
    emit_into(tmp_path / "fake", [make_winner("M=64,N=512,dtype=bf16", gpu="h200")])
    with pytest.raises(RecordError, match=r"sm_90a.cubin is no cubin for sm_90a"):
        package(tmp_path / "fake", ["sm_90a"], wheels)
    safe = tmp_path / "fake/kgen_ops/rmsnorm/safe.py"
    safe.write_text(safe.read_text() + "# mine\n")
    with pytest.raises(RecordError, match=r"(?s)changed since kgen wrote it.*safe.py was changed"):
        package(tmp_path / "fake", ["sm_80"], wheels)
    assert not wheels.exists()


def test_the_commands(library: Path, tmp_path: Path) -> None:
    script = "import sys\nfrom kgen.cli.main import main\n"
    package_it = ["package", "--from", str(library), "--arch", "sm_90a", "--wheel", str(tmp_path)]
    problems = [
        ("M=64,N=512,dtype=bf16", "h200"), ("M=65,N=512,dtype=bf16", "h200"),
        ("M=64,N=500,dtype=bf16", "h200"), ("M=8,N=16,dtype=fp32", "a100"),
        ("M=64,N=512,dtype=bf16", "h100"), ("M=64,N=500,dtype=bf16", "h100_pcie"),
        ("M=8,N=16,dtype=fp32", "h20"), ("M=8,K=x", "h200"), ("M", "h200"),
    ]
    script += f"print(main({package_it!r}))\n"
    for problem, gpu in problems:
        asked = ["explain", "--op", "rmsnorm", "--from", str(library), "--problem", problem,
                 "--gpu", gpu]
        script += f"print(main({asked!r}))\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=False)
    (wheel,) = tmp_path.glob("*.whl")
    assert str(wheel) in done.stdout
    assert "1 from the library" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.isdecimal()] == list("0000000222")
    for part in (
        "on h200: exact\n", "on h200: nearest\n", "on h200: safe\n", "on a100: safe\n",
        "none: rmsnorm was tuned for h200, host, none of compute capability 8.0\n",
        "on h200 (same architecture): exact\n", "on h100_pcie: safe\n",
        "table     h200's: h100 has none, and both are of compute capability 9.0\n",
    ):
        assert part in done.stdout
    for part in ("unknown GPU 'h20'\n  did you mean 'h200'?", "problem 'M=8,K=x': unknown name 'K'",
                 "problem 'M': unknown word 'M'"):
        assert part in done.stderr


def test_explain_suggests_operators(library: Path) -> None:
    command = ["explain", "--op", "rmsnrom", "--from", str(library), "--problem", "M=8,N=16"]
    done = subprocess.run([sys.executable, "-m", "kgen", *command], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 2
    assert "no operator 'rmsnrom'\n  did you mean 'rmsnorm'? known: rmsnorm" in done.stderr
