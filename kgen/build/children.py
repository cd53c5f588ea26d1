"""The parent's side of compiler processes: requests with a deadline; failed processes replaced."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kgen
from kgen.build import nvrtc_child
from kgen.build.base import Compiled, Failed
from kgen.build.limits import CompileLimits, ended_by, ran_out_of_memory
from kgen.build.resources import parse_remarks, parse_resources
from kgen.errors import ToolchainError

_START_TIMEOUT_S = 60.0  # NVRTC has 100 MB, which a cold network file system reads slowly
# Runs a file with kgen's folder added at the end of sys.path. At its beginning, the site-packages
# that hold an installed kgen would precede the standard library.
_RUN = ("import sys, runpy; sys.path.append(sys.argv.pop(1)); "
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')")
_LAST_WORDS = 4096  # bytes of a child's last output that are kept
# If an allocation is refused, NVRTC may crash without a message. A crash above this share of the
# memory limit counts as out of memory: the refused request did not fit, so the peak stays below the
# limit.
_NEAR_THE_LIMIT = 0.9
_CLOSED = "the compiler was closed before or while it compiled"


@dataclass(frozen=True, slots=True)
class Job:
    """A source to be compiled: its name in messages, its text, and its target."""

    name: str
    source: str
    arch: str
    include_dirs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a child: its status, its peak memory (0: unknown), its last output."""

    status: int
    peak_bytes: int
    words: str

    @property
    def how(self) -> str:
        if self.status < 0:
            return ended_by(-self.status)
        return f"the compiler ended itself with exit status {self.status}"


class _EndedError(Exception):
    """The child has closed its end of the pipe."""


class _LateError(Exception):
    """The child did not answer in time."""


class _Child:
    """One process; serves one thread at a time."""

    def __init__(self, library: str, memory_bytes: int) -> None:
        """Start it; `wait_started` waits until it can compile."""
        # A file, not a pipe: a full pipe would block a compiler that prints much.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            # Isolated, and without site-packages: importing those takes time.
            [sys.executable, "-I", "-S", "-c", _RUN, str(Path(kgen.__file__).parents[1]),
             nvrtc_child.__file__, library, str(memory_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, bufsize=0,
            start_new_session=True)  # Ctrl-C goes to the tuner and must not fail a build
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        self._alive = True
        self._lock = threading.Lock()
        self._parents_bytes = 0

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_started(self) -> None:
        """Wait until it has loaded NVRTC.

        Raises:
            ToolchainError: If NVRTC does not load there.
            _EndedError, _LateError: If the child ends or is late.
        """
        header, _ = self.ask(b"", _START_TIMEOUT_S)
        if header["kind"] != "started":
            raise ToolchainError(str(header["log"]))
        # A new process inherits the peak memory of its parent; a larger value is its own.
        self._parents_bytes = int(header["peak_bytes"])

    def ask(self, message: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Send a message, which may be empty, and wait for one.

        Raises:
            _EndedError, _LateError: If the child ends or is late.
        """
        deadline = time.monotonic() + timeout_s
        unsent, answer = memoryview(message), bytearray()
        requests, answers = self._requests.fileno(), self._answers.fileno()
        polled = select.poll()
        polled.register(answers, select.POLLIN)
        if unsent:
            polled.register(requests, select.POLLOUT)
        size = nvrtc_child.LENGTH.size
        wanted = size
        while len(answer) < wanted:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise _LateError
            for file, _ in polled.poll(1000 * min(left_s, 3600)):
                if file == answers:
                    # Read only this message; the next may follow at once.
                    chunk = os.read(answers, min(1 << 20, wanted - len(answer)))
                    if not chunk:
                        raise _EndedError
                    answer += chunk
                    continue
                try:
                    unsent = unsent[os.write(requests, unsent):]
                except BrokenPipeError:
                    raise _EndedError from None
                if not unsent:
                    polled.unregister(requests)
            if wanted == size <= len(answer):
                wanted += nvrtc_child.LENGTH.unpack(answer[:size])[0]
        return nvrtc_child.unpack_message(answer[size:])

    def waits(self) -> bool:
        """Whether the child waits for a request: it is alive and has sent no message."""
        said = select.poll()
        said.register(self._answers.fileno(), select.POLLIN)
        return not said.poll(0)

    def kill(self) -> None:
        """Kill the child, from any thread; the thread that waits for its answer calls `end`."""
        with self._lock:
            if self._alive:
                # Not Popen.kill, which may reap the process and lose its resource usage.
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> _End:
        """Kill the child if it still runs, and release its resources."""
        self.kill()
        with self._lock, self._stderr:
            self._alive = False
            self._requests.close()
            self._answers.close()
            _, status, used = os.wait4(self.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_WORDS))
            words = self._stderr.read().decode(errors="replace").strip()
        peak_bytes = used.ru_maxrss << 10
        if peak_bytes <= self._parents_bytes:
            peak_bytes = 0
        return _End(self._process.returncode, peak_bytes, words)


class Children:
    """Compiler processes: one per compiling thread, started on demand and reused."""

    def __init__(self, library: str, limits: CompileLimits, most_idle: int) -> None:
        """Start no process yet; `compile` starts them.

        Args:
            library: The NVRTC library that the processes load.
            limits: The limits of each compilation.
            most_idle: Number of idle processes that are kept.
        """
        self._library = library
        self._limits = limits
        self._most_idle = most_idle
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        # Ends the processes of a compiler that was not closed. No thread compiles then: it would
        # hold a reference to this object.
        weakref.finalize(self, _end_all, self._all)

    def pids(self) -> list[int]:
        """Ids of all processes, idle or compiling."""
        with self._lock:
            return [child.pid for child in self._all]

    def compile(self, job: Job) -> Compiled | Failed:
        """Compile in a child, within the limits.

        Raises:
            ToolchainError: If NVRTC cannot be used at all, or after `close`.
        """
        message = nvrtc_child.pack_message(
            {"name": job.name, "arch": job.arch, "include_dirs": job.include_dirs},
            job.source.encode())
        while True:
            start = time.perf_counter()
            child, was_idle = self._take()
            try:
                child.ask(message, self._limits.timeout_s)  # until it has begun
            except _EndedError:
                end = self._end(child)
                if not was_idle:
                    return Failed(f"nvrtc: {self._cause(end)}", time.perf_counter() - start)
                # The child died while it was idle, so this source is not the cause.
            except _LateError:
                self._end(child)
                return Failed(f"nvrtc: {self._limits.too_slow}", time.perf_counter() - start)
            except BaseException:
                self._end(child)
                raise
            else:
                return self._finish(child)

    def _finish(self, child: _Child) -> Compiled | Failed:
        """Wait for the result of a child that has begun to compile."""
        start = time.perf_counter()
        try:
            header, cubin = child.ask(b"", self._limits.timeout_s)
        except _LateError:
            self._end(child)
            return Failed(f"nvrtc: {self._limits.too_slow}", time.perf_counter() - start)
        except _EndedError:
            return Failed(f"nvrtc: {self._cause(self._end(child))}", time.perf_counter() - start)
        except BaseException:
            self._end(child)
            raise
        log = str(header["log"])
        no_memory = header["kind"] == "failed" and ran_out_of_memory(log)
        # Replace a child that has grown: the memory that it holds would count against the limit of
        # the next source.
        if no_memory or header["peak_bytes"] > self._limits.memory_bytes / 2:
            self._end(child)
        else:
            self._give_back(child)
        match header["kind"]:
            case "compiled":
                return Compiled(
                    cubin, parse_resources(log), header["seconds"], parse_remarks(log))
            case "failed":
                message_ = f"nvrtc: {self._limits.too_big}\n{log}" if no_memory else log
                return Failed(message_, header["seconds"])
            case _:
                raise ToolchainError(log)

    def close(self) -> None:
        """Kill all; compilations under way raise ToolchainError."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for child in self._all:
                child.kill()
        for child in idle:
            self._end(child, check=False)

    def _take(self) -> tuple[_Child, bool]:
        """A child that can compile, and whether it was idle before."""
        with self._lock:
            self._check()
            while self._idle:
                child = self._idle.pop()
                if child.waits():
                    return child, True
                self._all.discard(child)
                child.end()
            # Started under the lock, so that `close` sees every child; a start takes a millisecond.
            child = _Child(self._library, self._limits.memory_bytes)
            self._all.add(child)
        try:
            child.wait_started()
        except (_EndedError, _LateError) as problem:
            late = isinstance(problem, _LateError)
            end = self._end(child)
            how = f"not started after {_START_TIMEOUT_S:g} s" if late else end.how
            raise ToolchainError(f"the process that compiles with {self._library} does not start: "
                                 f"{how}\n{end.words}\n  see 'kgen doctor'") from None
        except BaseException:
            self._end(child, check=False)
            raise
        return child, False

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._most_idle:
                self._idle.append(child)
                return
        self._end(child, check=False)

    def _end(self, child: _Child, check: bool = True) -> _End:
        end = child.end()
        with self._lock:
            self._all.discard(child)
            if check:
                self._check()
        return end

    def _check(self) -> None:
        if self._closed:
            raise ToolchainError(_CLOSED)

    def _cause(self, end: _End) -> str:
        memory_bytes = self._limits.memory_bytes
        if ran_out_of_memory(end.words) or end.peak_bytes > _NEAR_THE_LIMIT * memory_bytes:
            return self._limits.too_big
        if end.status == -signal.SIGSEGV and not end.peak_bytes:  # a compiler may not check whether
            perhaps = f"; if for want of memory, it {self._limits.too_big}"  # it got what it wanted
            return f"{end.how}{perhaps}\n{end.words}".strip()
        return f"{end.how}\n{end.words}".strip()


def _end_all(children: set[_Child]) -> None:
    for child in children:
        with contextlib.suppress(OSError):  # at interpreter exit there is no one to report to
            child.end()
