"""Ctrl-C while modules load ends a command as at any other time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

from kgen.cli.main import main
sys.meta_path.insert(0, Interrupts())
sys.exit(main(sys.argv[2:]))
"""


GENERATED = Path(__file__).resolve().parents[2] / "generated"


@pytest.mark.parametrize("module", ["kgen.cli.parser", "kgen.cli.explain_command", "torch"])
def test_ctrl_c_while_a_module_loads(module: str) -> None:
    asked = "M=8,N=16,dtype=bf16"
    command = ["explain", "--op", "rmsnorm", "--problem", asked, "--from", str(GENERATED)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, module, *command],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert len(done.stderr.splitlines()) == 1
    # `explain` keeps nothing that a second run could go on from.
    assert done.stderr == "kgen: interrupted; the same command starts anew\n"
