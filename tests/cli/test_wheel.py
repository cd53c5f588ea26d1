"""kgen from a wheel, from any folder, with the operator of docs/tutorials/new-operator.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOFTMAX = ROOT / "docs" / "tutorials" / "softmax"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed; kgen's dependencies are the environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    for command in (
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(folder),
            str(ROOT),
        ],
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(folder / "site"),
            "kgen",
            "--find-links",
            str(folder),
        ],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def run(site: Path, cwd: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run kgen from the wheel: -P keeps the working folder, and so the checkout, off sys.path."""
    script = "import sys, kgen; from kgen.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site), **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_templates_and_spaces_travel(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "ops")
    assert done.returncode == 0, done.stderr
    assert "rows_in_registers" in done.stdout
    doctor = run(installed, tmp_path, "doctor").stdout
    assert str(installed) in doctor, "the device library is not the wheel's"


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
