"""Run a batch of compiler commands through ninja, each within limits of time and memory."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.build.limits import CompileLimits, ended_by, ended_program, ran_out_of_memory
from kgen.errors import ToolchainError

_TIMED_OUT = 124  # exit status of timeout(1) after the time limit
_SIGNALLED = 128  # a shell's exit status for a killed command is this plus the signal's number
_KILLED = _SIGNALLED + 9
_TERMINATED = _SIGNALLED + 15
_GRACE_S = 2  # seconds from SIGTERM to SIGKILL
# Limit on any file that a command writes, its log included; far above any regular size.
_FILE_BYTES = 1 << 30
_LOG_CHARACTERS = 4 << 20


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a batch, and the file that the command must write."""

    arguments: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a command: `error` is empty if it wrote its output."""

    error: str
    log: str
    seconds: float


def find_tool(name: str, next_step: str) -> str:
    """Return a program's path.

    Raises:
        ToolchainError: If the program is neither on PATH nor beside the Python interpreter (where
            it lies in an environment that was not activated).
    """
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise ToolchainError(f"'{name}' is missing: not on PATH\n  next: {next_step}")
    return found


class Ninja:
    """Finds ninja and timeout(1) once, then runs batches. `run` may be called from any thread."""

    def __init__(self, limits: CompileLimits) -> None:
        """Find the tools.

        Args:
            limits: The limits of each command; the memory limit holds for each of its processes.
        Raises:
            ToolchainError: If one is missing.
        """
        self._limits = limits
        self._ninja = find_tool("ninja", "pip install ninja")
        self._timeout = find_tool("timeout", "install GNU coreutils")
        # setpriv ends ninja when this process ends, and each command when ninja ends. Without it a
        # command would run until its time limit, because timeout(1) leaves the process group that
        # ninja kills.
        setpriv = shutil.which("setpriv")
        self._tied = (setpriv, "--pdeathsig", "TERM") if setpriv else ()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def run(
        self, commands: Sequence[Command], folder: Path, jobs: int,
        limits: CompileLimits | None = None,
    ) -> list[Done]:
        """Run commands in `folder`, at most `jobs` at once; a failure does not stop the others.

        Args:
            commands: The commands. Their paths, `output` included, are relative to `folder` or
                absolute.
            folder: An empty directory; receives build.ninja and logs.
            jobs: Concurrent commands.
            limits: Replaces the limits of the constructor. A command that takes longer is ended
                with all processes that it started.
        Raises:
            ToolchainError: If ninja itself fails, or after `close`.
        """
        limits = limits or self._limits
        lines = ["ninja_required_version = 1.5", "rule run", "  command = $line",
                 "  description = $out"]
        for index, command in enumerate(commands):
            words = [*self._tied, self._timeout, "-k", str(_GRACE_S), f"{limits.timeout_s:g}",
                     *command.arguments]
            # The command writes its status and times to files, because ninja does not report them
            # for a failed command. timeout(1) leads a process group of its own. cicc and cc1plus
            # catch SIGTERM, and nvcc does not wait for them when it ends, so the whole group is
            # killed at the end.
            kill = "kill -s KILL -- -$group 2> /dev/null"
            line = (f": > {index}.start; trap '{kill}; exit {_TERMINATED}' INT TERM; "
                    f"({_ulimits(limits)}; exec {shlex.join(words)}) > {index}.log 2>&1 & "
                    f"group=$!; wait $group; status=$?; {kill}; "
                    f"echo $status > {index}.status; exit $status")
            lines += [f"build {_escape(command.output, path=True)}: run",
                      f"  line = {_escape(line)}"]
        (folder / "build.ninja").write_text("\n".join(lines) + "\n")
        text = self._run_ninja(folder, jobs)
        return [_done(folder, index, command, limits, text)
                for index, command in enumerate(commands)]

    def close(self) -> None:
        """End running commands; `run` then raises ToolchainError."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.terminate()  # ninja then ends its commands

    def _run_ninja(self, folder: Path, jobs: int) -> str:
        # setpriv's signal comes when the thread that started ninja dies. This thread waits for
        # ninja, so it dies only with the process.
        arguments = [*self._tied, self._ninja, "-C", str(folder), "-j", str(jobs), "-k", "0"]
        # Files of a killed compiler are removed with the folder.
        environment = {**os.environ, "TMPDIR": str(folder)}
        with self._lock:
            self._check()
            process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, env=environment,
                # Ctrl-C goes to the tuner and must not fail a build.
                start_new_session=True)
            self._running.add(process)
        with process:
            try:
                text, _ = process.communicate()
            except BaseException:
                process.terminate()
                process.wait()
                raise
            finally:
                with self._lock:
                    self._running.discard(process)
        with self._lock:
            self._check()
        return text

    def _check(self) -> None:
        if self._closed:
            raise ToolchainError("the compiler was closed before or while it compiled")


def _ulimits(limits: CompileLimits) -> str:
    # Units of a POSIX shell's ulimit: KiB for memory, blocks of 512 bytes for files. Core files are
    # off, because the core of a compiler can be as large as the limit.
    return (f"ulimit -c 0; ulimit -v {max(1, limits.memory_bytes >> 10)}; "
            f"ulimit -f {_FILE_BYTES >> 9}")


def _done(
    folder: Path, index: int, command: Command, limits: CompileLimits, ninja_text: str
) -> Done:
    start, ended = folder / f"{index}.start", folder / f"{index}.status"
    if not ended.exists():
        raise ToolchainError(f"ninja failed:\n{ninja_text.strip()}")
    with (folder / f"{index}.log").open(errors="replace") as file:
        log = file.read(_LOG_CHARACTERS).strip()
    seconds = ended.stat().st_mtime - start.stat().st_mtime
    status = int(ended.read_text())
    if status == _TIMED_OUT or (status == _KILLED and seconds >= limits.timeout_s):
        return Done(limits.too_slow, log, seconds)
    if status != 0 and ran_out_of_memory(log):
        return Done(limits.too_big, log, seconds)
    if status > _SIGNALLED:
        return Done(ended_by(status - _SIGNALLED), log, seconds)
    if status != 0:
        return Done(ended_program(log) or f"exit status {status}", log, seconds)
    if not (folder / command.output).exists():
        return Done(f"wrote no {command.output}", log, seconds)
    return Done("", log, seconds)


def _escape(text: str, path: bool = False) -> str:
    text = text.replace("$", "$$")
    return text.replace(" ", "$ ").replace(":", "$:") if path else text

