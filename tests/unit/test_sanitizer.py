"""Runs under compute-sanitizer, with a stand-in that runs the trial or reports a fault."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import ToolchainError
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.problem import parse_problem
from kgen.trial import ComputeSanitizer
from kgen.trial.sanitizer import _only_kernels
from kgen.worker import Candidate, Setup, Trial

FINDING = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at rmsnorm_forward+0x1a0
=========     by thread (31,0,0) in block (7,0,0)
=========     Address 0x7f00 is out of bounds
========= ERROR SUMMARY: 1 error
"""
# Runs what follows the options of the real tool, or writes a finding to its log.
STAND_IN = """#!/bin/sh
while [ "$1" != "{python}" ]; do
  [ "$1" = "--log-file" ] && log="$2"
  [ "$1" = "--error-exitcode" ] && code="$2"
  [ "$1" = "--kernel-name" ] && [ -n "$STAND_IN_FILTER" ] && echo "$2" > "$STAND_IN_FILTER"
  shift
done
if [ -n "$STAND_IN_FINDS" ]; then cat "$STAND_IN_FINDS" > "$log"; exit "$code"; fi
if [ -n "$STAND_IN_FAILS" ]; then echo "no such GPU" >&2; exit 3; fi
exec "$@"
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ComputeSanitizer:
    import sys

    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "compute-sanitizer"
    script.write_text(STAND_IN.replace("{python}", sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return ComputeSanitizer()


@pytest.fixture(scope="module")
def trial() -> Trial:
    entry = open_catalogue().entry("rmsnorm")
    variant = entry.space.safe_variant("forward")
    assert variant.safe is not None
    problem = parse_problem("M=9,N=64,dtype=fp32", entry.operator.signature)
    source = Renderer(include_dir()).render(
        "rmsnorm", entry.templates, variant, variant.safe, problem
    )
    compiler = open_compiler("host", [include_dir()])
    built = compiler.build([BuildRequest(source, "host")])[0]
    compiler.close()
    assert isinstance(built, Artifact)
    candidate = Candidate(variant, variant.safe, built)
    return Trial("forward", problem, candidate, level="host", measure=False, orders=(0,))


SETUP = Setup("rmsnorm", (), profile_named("host"), 0, 0)


def test_a_clean_trial_has_no_fault(tool: ComputeSanitizer, trial: Trial) -> None:
    assert tool.check(SETUP, trial, "memcheck").fault == ""


def test_a_finding_is_told_without_its_frame(
    tool: ComputeSanitizer, trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "finding"
    log.write_text(FINDING)
    monkeypatch.setenv("STAND_IN_FINDS", str(log))
    found = tool.check(SETUP, trial, "memcheck")
    assert found.fault.startswith("Invalid __global__ write of size 2 bytes")
    assert "thread (31,0,0) in block (7,0,0)" in found.fault
    assert "=====" not in found.fault


def test_only_the_kernels_of_the_variant_are_watched(
    tool: ComputeSanitizer, trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "filter"
    monkeypatch.setenv("STAND_IN_FILTER", str(seen))
    assert tool.check(SETUP, trial, "racecheck").fault == ""
    assert seen.read_text() == "kernel_substring=rmsnorm_forward\n"


@pytest.mark.parametrize(
    ("names", "filtered"),
    [
        (("wkv7_segment_states", "wkv7_forward"), "wkv7_"),
        (("softmax",), "softmax"),
        (("first", "second"), ""),
    ],
)
def test_kernels_have_one_filter(names: tuple[str, ...], filtered: str) -> None:
    options = ("--kernel-name", f"kernel_substring={filtered}") if filtered else ()
    assert _only_kernels(names) == options


def test_a_tool_that_fails_is_no_clean_bill(
    tool: ComputeSanitizer, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    assert "ended with status 3: no such GPU" in tool.check(SETUP, trial, "racecheck").fault


def test_a_missing_tool_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(ToolchainError, match="compute-sanitizer"):
        ComputeSanitizer()
