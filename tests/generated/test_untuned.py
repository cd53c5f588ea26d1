"""An operator that was tuned nowhere: its families and safe kernels serve it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from family_library import host_library

from kgen.assets import include_dir
from kgen.build import Compiler
from kgen.catalogue import open_catalogue, profile_named
from kgen.cli.main import main
from kgen.emit import renew

ASK = """
import kgen_ops
gpu = kgen_ops._runtime.rows.Gpu("a100", "A100", ("NVIDIA A100",), "sm_80", {facts})
for t, dtype in ((64, "fp32"), (2048, "bf16")):
    print(kgen_ops.explain("timex", gpu=gpu, B=4, C=8, T=t, dtype=dtype).step)
print(hasattr(kgen_ops, "timex_backward"))
"""


def no_compiler(headers: Path) -> Compiler:
    raise AssertionError("nothing was measured, so nothing has to be compared")


def test_it_is_served_by_families_and_renewed(tmp_path: Path) -> None:
    catalogue = open_catalogue()
    library = host_library(tmp_path, include_dir(), ["rmsnorm"])
    timex = catalogue.entry("timex")
    done = renew(library, catalogue.entry, include_dir(), no_compiler, [timex])
    assert done.operators == ("rmsnorm", "timex")
    assert done.stale == ()
    again = renew(library, catalogue.entry, include_dir(), no_compiler)
    assert again.changed == ()
    assert renew(library, catalogue.entry, include_dir(), no_compiler, [timex]).changed == ()
    facts = profile_named("a100").names
    found = subprocess.run(
        [sys.executable, "-c", ASK.format(facts=facts)], cwd=library, capture_output=True,
        text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["family", "family", "True"]
    asked = ["explain", "--op", "timex", "--from", str(library), "--gpu", "a100",
             "--problem", "B=2,C=3,T=64,dtype=fp32"]
    found = subprocess.run([sys.executable, "-m", "kgen", *asked], capture_output=True, text=True,
                           check=False)
    assert found.stdout.endswith("table     none: timex was not tuned for any GPU\n"), found.stderr
    readme = (library / "README.md").read_text()
    assert "timex" in readme
    safe = (library / "kgen_ops/timex/safe.yaml").read_text()
    assert "code:" not in safe, "no machine code of it was proven"


def test_the_command_needs_a_known_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["emit", "--add", "timexx", "--out", str(tmp_path)]) == 2
    assert "did you mean 'timex'" in capsys.readouterr().err
    assert main(["emit", "--add", "timex", "--out", str(tmp_path)]) == 2
    assert "there is no library" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
