"""Runs a candidate under compute-sanitizer on the GPU, with small input sets.

The sanitizer slows kernels down by one to two orders of magnitude. So each pair of a candidate and
a tool runs in its own process on small input sets, and only the candidate's kernels are
instrumented, not torch's.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.errors import ToolchainError
from kgen.model.record import Fate
from kgen.worker.messages import Setup, Trial, TrialOutcome

TOOLS = ("memcheck", "racecheck")
TIMEOUT_S = 300.0
_FOUND = 86  # the sanitizer's exit status if it found a fault; kgen's programs do not use it
_MAX_LINES = 8
_RULE = re.compile(r"^=+ ?")


@dataclass(frozen=True, slots=True)
class Sanitized:
    """The result of one sanitizer tool for one candidate.

    Attributes:
        tool: `memcheck` or `racecheck`.
        fault: The tool's finding; empty if there is none.
    """

    tool: str
    fault: str


class ComputeSanitizer:
    """NVIDIA's compute-sanitizer, where it is installed."""

    def __init__(self) -> None:
        """Find it on PATH or in $CUDA_HOME (else /usr/local/cuda).

        Raises:
            ToolchainError: If it is missing.
        """
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        places = os.pathsep.join([f"{home}/bin", f"{home}/compute-sanitizer"])
        found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=places)
        if found is None:
            raise ToolchainError(
                "'compute-sanitizer' is missing: not on PATH, nor in the CUDA toolkit\n"
                "  next: install the CUDA toolkit's compute-sanitizer, or leave --sanitize out"
            )
        self._path = found

    def check(self, setup: Setup, trial: Trial, tool: str) -> Sanitized:
        """Run a trial's small input sets under a tool."""
        with tempfile.TemporaryDirectory(prefix="kgen-sanitizer-") as name:
            job = Path(name, "trial.job")
            job.write_bytes(pickle.dumps((setup, trial)))
            log = Path(name, "log")
            command = [
                self._path,
                *("--tool", tool, "--error-exitcode", str(_FOUND), "--log-file", str(log)),
                # kgen counts a kernel's parameters by querying the driver until an index fails;
                # that failure must not be reported.
                *("--report-api-errors", "no"),
                *_only_kernels([x.kernel for x in trial.candidate.variant.launches]),
                *(sys.executable, "-m", "kgen.worker.alone", str(job)),
            ]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired:
                return Sanitized(tool, f"did not end within {TIMEOUT_S:.0f} s")
            said = log.read_text(errors="replace") if log.exists() else ""
            if done.returncode == _FOUND:
                return Sanitized(tool, _head(said))
            out = job.with_suffix(".out")
            if done.returncode != 0 or not out.exists():
                last = (done.stderr.strip().splitlines() or said.strip().splitlines() or [""])[-1]
                return Sanitized(tool, f"{tool} ended with status {done.returncode}: {last}")
            outcome = pickle.loads(out.read_bytes())
        assert isinstance(outcome, TrialOutcome)
        return Sanitized(tool, "" if outcome.fate is Fate.VERIFIED else outcome.reason)


def _only_kernels(names: Sequence[str]) -> tuple[str, ...]:
    """Options that restrict the sanitizer to these kernels by the common prefix of their names.

    The sanitizer takes a single filter; without a common prefix there are no options.
    """
    common = names[0]
    while not all(name.startswith(common) for name in names):
        common = common[:-1]
    return ("--kernel-name", f"kernel_substring={common}") if common else ()


def _head(log: str) -> str:
    """The first finding of a log: the fault, the kernel and the thread."""
    lines = [_RULE.sub("", line).rstrip() for line in log.splitlines()]
    lines = [x for x in lines if x.strip() and not x.startswith("COMPUTE-SANITIZER")]
    lines = [x for x in lines if "Host Frame" not in x and "Saved host backtrace" not in x]
    return "\n".join(lines[:_MAX_LINES]) or "it found errors, and did not say which"
