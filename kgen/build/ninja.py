"""Run a batch of compiler commands through ninja, each with a time limit."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.errors import ToolchainError

_TIMED_OUT = 124  # of timeout(1)
_KILLED = 128 + 9
_GRACE_S = 2  # from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a batch: what it runs, and the file it must write."""

    arguments: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended: `error` is empty if it wrote its output."""

    error: str
    log: str
    seconds: float


def find_tool(name: str, next_step: str) -> str:
    """Return a program's path.

    Raises:
        ToolchainError: If it is neither on PATH nor beside the interpreter (an environment that was
            not activated).
    """
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise ToolchainError(f"'{name}' is missing: not on PATH\n  next: {next_step}")
    return found


class Ninja:
    """Finds ninja and timeout(1) once, then runs batches."""

    def __init__(self) -> None:
        """Find the tools.

        Raises:
            ToolchainError: If one is missing.
        """
        self._ninja = find_tool("ninja", "pip install ninja")
        self._timeout = find_tool("timeout", "install GNU coreutils")

    def run(
        self, commands: Sequence[Command], folder: Path, jobs: int, timeout_s: float
    ) -> list[Done]:
        """Run commands in `folder`, at most `jobs` at once; a failure does not stop the others.

        Args:
            commands: Paths in them, and `output`, are relative to `folder` or absolute.
            folder: An empty directory; receives build.ninja and logs.
            jobs: Commands at once.
            timeout_s: A command that takes longer is ended with everything that it started.
        Raises:
            ToolchainError: If ninja itself fails.
        """
        lines = ["ninja_required_version = 1.5", "rule run", "  command = $line",
                 "  description = $out"]
        for index, command in enumerate(commands):
            words = [self._timeout, "-k", str(_GRACE_S), f"{timeout_s:g}", *command.arguments]
            # Status and times are written down because ninja does not report those of failures.
            line = (f": > {index}.start; {shlex.join(words)} > {index}.log 2>&1; "
                    f"status=$?; echo $status > {index}.status; exit $status")
            lines += [f"build {_escape(command.output, path=True)}: run",
                      f"  line = {_escape(line)}"]
        (folder / "build.ninja").write_text("\n".join(lines) + "\n")
        text = self._run_ninja(folder, jobs)
        return [_done(folder, index, command, timeout_s, text)
                for index, command in enumerate(commands)]

    def _run_ninja(self, folder: Path, jobs: int) -> str:
        arguments = [self._ninja, "-C", str(folder), "-j", str(jobs), "-k", "0"]
        # What a killed compiler leaves behind goes away with the folder.
        environment = {**os.environ, "TMPDIR": str(folder)}
        with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, env=environment,
                              # Ctrl-C is the tuner's to handle: it must not read as a failed build.
                              start_new_session=True) as process:
            try:
                text, _ = process.communicate()
            except BaseException:
                process.terminate()  # ninja then ends what it started
                process.wait()
                raise
        return text


def _done(folder: Path, index: int, command: Command, timeout_s: float, ninja_text: str) -> Done:
    start, ended = folder / f"{index}.start", folder / f"{index}.status"
    if not ended.exists():
        raise ToolchainError(f"ninja failed:\n{ninja_text.strip()}")
    log = (folder / f"{index}.log").read_text(errors="replace").strip()
    seconds = ended.stat().st_mtime - start.stat().st_mtime
    status = int(ended.read_text())
    if status in (_TIMED_OUT, _KILLED):
        return Done(f"ended after {timeout_s:g} s", log, seconds)
    if status != 0:
        return Done(f"exit status {status}", log, seconds)
    if not (folder / command.output).exists():
        return Done(f"wrote no {command.output}", log, seconds)
    return Done("", log, seconds)


def _escape(text: str, path: bool = False) -> str:
    text = text.replace("$", "$$")
    return text.replace(" ", "$ ").replace(":", "$:") if path else text

