"""The wheels of kgen and kgen_ops, installed into an empty environment and used from any folder.

The user's operator is that of docs/tutorials/new-operator.md.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family_library import host_library
from tutorial_steps import python_block

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue
from kgen.emit import emit
from kgen.emit.untuned import untuned_safe_kernels

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "generated"
SOFTMAX = ROOT / "docs" / "tutorials" / "softmax"
# timex is the operator with the fewest combinations of dtypes, each of which a tune certifies.
TINY_TUNE = ("tune", "--op", "timex", "--gpu", "host", "--pass", "forward", "--trials", "1",
             "--no-peers", "--problem", "B=1,C=8,T=32,dtype=fp32")  # fmt: skip
# The environment of pip and the installed programs, without this checkout.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def pip(*arguments: str, python: str | Path = sys.executable) -> None:
    done = subprocess.run([str(python), "-m", "pip", *arguments], capture_output=True, text=True,
                          check=False, env=ENVIRONMENT, cwd=tempfile.gettempdir())  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def build(source: Path, folder: Path) -> Path:
    """Build a wheel as `pip install` does, without network."""
    known = set(folder.glob("*.whl"))
    pip("wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index",
        "--disable-pip-version-check", "--wheel-dir", str(folder), str(source))  # fmt: skip
    (wheel,) = set(folder.glob("*.whl")) - known
    return wheel


def copy_of_library(folder: Path) -> Path:
    """Without journals, which no wheel has; setuptools writes beside its source."""
    unused = shutil.ignore_patterns("*.jsonl", "build", "*.egg-info", "__pycache__", "*.so")
    return Path(shutil.copytree(LIBRARY, folder / "generated", ignore=unused))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`kgen` and `kgen_ops`: the wheel of each."""
    folder = tmp_path_factory.mktemp("wheels")
    return {
        "kgen": build(ROOT, folder),
        "kgen_ops": build(copy_of_library(tmp_path_factory.mktemp("library")), folder),
    }


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with both wheels and their dependencies, without this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for kind in ("purelib", "platlib"):
        for path in Path(sysconfig.get_path(kind)).iterdir():
            link = dependencies / path.name
            is_kgen = path.name.lstrip("_").startswith(("kgen", "editable"))
            if not (is_kgen or link.exists() or path.suffix == ".pth"):
                link.symlink_to(path)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    python = folder / "bin" / "python"
    pip("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check",
        *map(str, wheels.values()), python=python)  # fmt: skip
    return folder


def run(
    environment: Path, cwd: Path, *arguments: str, tool: str = "kgen", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment."""
    return subprocess.run(
        [str(environment / "bin" / tool), *arguments],
        cwd=cwd,
        env={**ENVIRONMENT, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def below(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix()


def test_what_is_in_them(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        files = content(wheel)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {len(files)} files")
        folders = {file.split("/")[0] for file in files}
        (info,) = (folder for folder in folders if folder.endswith(".dist-info"))
        assert folders == {name, info}
        metadata = email.message_from_bytes(files[f"{info}/METADATA"])
        assert metadata["License-Expression"] == "Apache-2.0"
        licences = metadata.get_all("License-File") or []
        assert "LICENSE" in {file.split("/")[-1] for file in licences}
        for file in licences:
            assert len(files[f"{info}/licenses/{file}"]) > 1000
        assert f"{name}/py.typed" in files
        assert not [file for file in files if "test_" in file or "conftest" in file]
        for place in (str(ROOT), tempfile.gettempdir(), str(Path.home())):
            # A built extension names the folder of the interpreter's own library.
            found = [file for file, data in files.items()
                     if f"{place}/".encode() in data
                     and not (file.endswith(".so") and sys.base_prefix.startswith(place))]
            assert not found, f"{place} is named in them"


def test_all_files_travel(wheels: dict[str, Path]) -> None:
    files = content(wheels["kgen"])
    for folder in ("templates", "search_spaces"):
        packed = {f"kgen/_data/{folder}/{file}" for file in below(ROOT / folder)}
        assert packed == {file for file in files if file.startswith(f"kgen/_data/{folder}/")}
    listed = (LIBRARY / "kgen_ops" / "SHA256SUMS").read_text().splitlines()
    built = content(wheels["kgen_ops"])
    assert {f"kgen_ops/{line[66:]}" for line in listed} <= built.keys()
    assert not [file for file in built if file.endswith(".jsonl")]


def test_a_kernel_that_is_gone_is_not_in_the_next_wheel(tmp_path: Path) -> None:
    library = host_library(tmp_path, include_dir(), ["rmsnorm"])
    gone = library / "kgen_ops" / "rmsnorm" / "gone.py"
    gone.write_text("")
    assert "kgen_ops/rmsnorm/gone.py" in content(build(library, tmp_path))
    gone.unlink()
    (tmp_path / "again").mkdir()
    assert "kgen_ops/rmsnorm/gone.py" not in content(build(library, tmp_path / "again"))


def test_pip_finds_nothing_missing(installed: Path, tmp_path: Path) -> None:
    listed = run(installed, tmp_path, "-m", "pip", "list", tool="python").stdout.split()
    assert {"kgen", "kgen-ops", "torch"} <= {name.replace("_", "-") for name in listed}
    checked = run(installed, tmp_path, "-m", "pip", "check", tool="python")
    assert "kgen" not in checked.stdout, checked.stdout
    assert not checked.stderr, checked.stderr


def library_for_the_cpu(folder: Path) -> Path:
    """rmsnorm with a row for the host, and safe kernels of both passes.

    The committed library has rows for GPUs only, and a tune would certify all combinations of
    dtypes, which takes minutes.
    """
    host_library(folder, include_dir(), ["rmsnorm"])
    entry = open_catalogue().entry("rmsnorm")
    safe = [kernel for kernel in untuned_safe_kernels(entry, include_dir())
            if kernel.dtypes["dtype"] == "bf16"]
    emit(folder, [], safe, include_dir(), entry)
    return folder


def test_the_readme_example(installed: Path, tmp_path: Path) -> None:
    """With a GPU it is the README's text and the committed library."""
    changes: dict[str, str] = {}
    where, env = installed, {}
    if not torch.cuda.is_available():
        changes = {'"cuda"': '"cpu"', "32768": "32", "8192": "256"}
        where = tmp_path / "site"
        wheel = build(library_for_the_cpu(tmp_path / "library"), tmp_path)
        pip("install", "--quiet", "--no-deps", "--no-index", "--target", str(where), str(wheel),
            python=installed / "bin" / "python")  # fmt: skip
        env = {"PYTHONPATH": str(where)}
    example = python_block(ROOT / "README.md", "kgen_ops.rmsnorm", changes)
    example += "\nprint(kgen_ops.__file__, x.grad.shape)"
    done = run(installed, tmp_path, "-c", example, tool="python", **env)
    assert done.returncode == 0, done.stderr
    assert str(where) in done.stdout, "another kgen_ops was imported"
    assert "torch.Size" in done.stdout


def test_the_library_tests_itself(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "kgen_ops.selftest", "--device", "none", tool="python")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "files: exactly those" in done.stdout


def test_templates_and_spaces_travel(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "ops")
    assert done.returncode == 0, done.stderr
    assert "rows_in_registers" in done.stdout
    doctor = run(installed, tmp_path, "doctor").stdout
    assert str(installed) in doctor, "the device library is not the wheel's"


def test_tune_emit_and_package_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    tuned = run(installed, tmp_path, *TINY_TUNE)
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    library = tmp_path / "generated"
    assert (library / "kgen_ops" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert 'license = "Apache-2.0"' in (library / "pyproject.toml").read_text()
    emitted = run(installed, tmp_path, "emit")
    assert emitted.returncode == 0, emitted.stdout + emitted.stderr
    assert "0 stale" in emitted.stdout
    files = content(build(library, tmp_path))
    assert "kgen_ops/timex/__init__.pyi" in files


def test_an_operator_of_ones_own(installed: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(SOFTMAX, mine)
    listed = run(installed, tmp_path, "ops", KGEN_PATH=str(mine))
    assert "softmax" in listed.stdout
    done = run(
        installed,
        tmp_path,
        "tune",
        "--op",
        "softmax",
        "--gpu",
        "host",
        "--path",
        str(mine),
        "--trials",
        "3",
        "--no-peers",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The library has kgen's licence beside its files, and does not say that softmax has it.
    assert (tmp_path / "generated" / "kgen_ops" / "LICENSE").is_file()
    assert "\nlicense =" not in (tmp_path / "generated" / "pyproject.toml").read_text()
    script = (
        "import torch, kgen_ops\n"
        "x = torch.randn(5, 7, 256)\n"
        "torch.testing.assert_close(kgen_ops.softmax(x), x.softmax(-1))\n"
    )
    used = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path / "generated",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
        check=False,
    )
    assert used.returncode == 0, used.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "exit_code", "part"),
    [
        ("search_spaces/softmax.yaml", "grid: [M]", "grid: [MM]", 2, "softmax.yaml:10"),
        ("search_spaces/softmax.yaml", "params:", "parms:", 2, "softmax.yaml:6"),
        (
            "search_spaces/softmax.yaml",
            "      params:",
            "      require:\n        - {rule: N > 10 ** 6, why: never so}\n      params:",
            2,
            "never so",
        ),
        (
            "templates/softmax/forward_block_per_row.cu.jinja",
            "${threads}",
            "${thread}",
            2,
            "undeclared name 'thread'",
        ),
        (
            "templates/softmax/forward_block_per_row.cu.jinja",
            "float sum = 0.0f;",
            "float sum = zero;",
            1,
            "was not declared in this scope",
        ),
        (
            "templates/softmax/forward_block_per_row.cu.jinja",
            "/ sum);",
            "/ (sum + 1.0f));",
            1,
            "out of bound",
        ),
        ("operators/softmax.py", "import torch\n", "import torhc\n", 2, "torhc"),
    ],
)
def test_an_authors_mistake_is_explained(
    installed: Path, tmp_path: Path, file: str, old: str, new: str, exit_code: int, part: str
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(SOFTMAX, mine)
    text = (mine / file).read_text()
    assert old in text
    place = text.index(old) if "import" not in old else text.index("if TYPE_CHECKING")
    mended = text[:place] + text[place:].replace(old, new, 1)
    (mine / file).write_text(
        mended.replace("if TYPE_CHECKING:", "if True:") if "import" in old else mended
    )
    done = run(
        installed,
        tmp_path,
        "tune",
        "--op",
        "softmax",
        "--gpu",
        "host",
        "--path",
        str(mine),
        "--trials",
        "2",
        "--no-peers",
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert part in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "generated" / "kgen_ops" / "__init__.py").exists()
