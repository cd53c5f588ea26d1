"""`kgen verify --library` checks the kernels of a library as they are in its folder."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kgen.catalogue import open_catalogue
from kgen.cli.verify_command import _print
from kgen.model.config import Config
from kgen.model.problem import parse_problem
from kgen.model.record import Evidence, Fate
from kgen.verify import Checked, drawn_problems
from kgen.worker import TrialOutcome

# Runs the command with a mistake in each kernel source of the library: a factor of 1.5.
PLANTED = """
import sys
from kgen.cli.main import main
from kgen.emit import LoadedLibrary
honest = LoadedLibrary.source
def source(self, *asked):
    text = honest(self, *asked)
    assert "kgen::rsqrt(" in text
    return text.replace("kgen::rsqrt(", "1.5f * kgen::rsqrt(")
LoadedLibrary.source = source
sys.exit(main(sys.argv[1:]))
"""

# Runs the command where the first kernel's inputs do not fit the memory.
NO_ROOM = """
import sys
from kgen.cli.main import main
from kgen.errors import VerifyError
from kgen.verify import OnHost
honest, calls = OnHost.outcome, []
def outcome(self, rendered, artifact, config, problem):
    calls.append(problem)
    if len(calls) == 1:
        raise VerifyError(f"{problem} does not fit")
    return honest(self, rendered, artifact, config, problem)
OnHost.outcome = outcome
sys.exit(main(sys.argv[1:]))
"""


def verify(cwd: Path, *arguments: str, script: str = "") -> subprocess.CompletedProcess[str]:
    start = ["-c", script] if script else ["-m", "kgen"]
    return subprocess.run(
        [sys.executable, *start, "verify", "--op", "rmsnorm", "--library", *arguments], cwd=cwd,
        capture_output=True, text=True, check=False, timeout=480,
    )


def test_rows_and_problems_that_nobody_tuned_are_checked(tuned: Path) -> None:
    done = verify(tuned, "--gpu", "host", "--pass", "forward", "--array", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  skipped: ")]
    assert len(lines) == 1 + 3 + 1
    assert lines[0].startswith("forward exact verified")
    assert all(line.split()[1] in ("family", "nearest", "safe") for line in lines[1:4])
    assert "forward: 4 of 4 kernels compute rmsnorm on CPU" in lines[-1]


def test_a_wrong_kernel_of_the_library_is_found(tuned: Path) -> None:
    done = verify(tuned, "--gpu", "host", "--pass", "forward", "--array", "1", script=PLANTED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count(" wrong ") == 2
    assert "forward: 0 of 2 kernels compute rmsnorm" in done.stdout


def test_a_problem_that_does_not_fit_leaves_the_others_checked(tuned: Path) -> None:
    done = verify(tuned, "--gpu", "host", "--pass", "forward", "--array", "1", script=NO_ROOM)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("forward exact rejected")
    assert " does not fit" in done.stdout
    assert "forward: 1 of 2 kernels compute rmsnorm" in done.stdout


def test_a_kernel_file_that_was_changed_is_refused(tuned: Path, tmp_path: Path) -> None:
    copy = tmp_path / "generated"
    subprocess.run(["cp", "-r", tuned / "generated", copy], check=True)
    (copy / "kgen_ops" / "rmsnorm" / "tables" / "host.py").write_text("FORWARD = ()\n")
    done = verify(copy.parent, "--gpu", "host", "--array", "0")
    assert done.returncode != 0
    assert "tables/host.py" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.quick
def test_options_that_contradict_it_are_named(tmp_path: Path) -> None:
    done = verify(tmp_path, "--gpu", "host", "--problem", "M4 N8 fp32")
    assert done.returncode == 2
    assert "--library chooses its problems" in done.stderr
    done = verify(tmp_path, "--gpu", "host")
    assert done.returncode != 0
    assert "there is no library in generated" in done.stderr


@pytest.mark.quick
def test_what_was_skipped_or_shortened_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    problem = parse_problem("M=4,N=8,dtype=fp32", open_catalogue([]).operator("rmsnorm").signature)
    shortened = "normal M=8193 N=1 (M=4097 instead)"
    evidence = Evidence(0, (), ("normal M=64", shortened), launches=3, bitwise=True)
    _print(Checked(problem, Config("naive", ()), TrialOutcome(
        Fate.VERIFIED, "", evidence=evidence)))
    assert f"  skipped: normal M=64, {shortened}\n" in capsys.readouterr().out


@pytest.mark.quick
def test_drawn_problems_are_legal_distinct_and_repeatable() -> None:
    for name in open_catalogue([]).names:
        signature = open_catalogue([]).operator(name).signature
        some = list(drawn_problems(signature, [], 50, seed=3))
        known = some[:20]
        drawn = list(drawn_problems(signature, known, 80, seed=5))
        assert drawn == list(drawn_problems(signature, known, 80, seed=5))
        assert drawn != list(drawn_problems(signature, known, 80, seed=6))
        assert len(set(drawn)) == len(drawn) == 80
        for problem in drawn:
            assert parse_problem(str(problem), signature) == problem
        for position, dim in enumerate(signature.dims):
            extents = Counter(problem.dims[position][1] for problem in drawn)
            assert len(extents) > 2 or signature.packing, (name, dim)
