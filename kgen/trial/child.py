"""The parent's handle of one worker process: pipes, output, exit status."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import connection, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext

from kgen.worker.messages import Setup
from kgen.worker.process import worker_main

# Enough to show what is printed, and the last lines that a crashed worker wrote to stderr.
_HEAD_BYTES = 200
_TAIL_BYTES = 4000


_SPAWN = multiprocessing.get_context("spawn")  # for GPUs: fork would copy CUDA state


# A Unix socket's path has at most 107 bytes, of which the server's socket uses so many below the
# temporary folder.
_MOST_SOCKET_BYTES = 107
_SOCKET_NAME_BYTES = len("/pymp-12345678/listener-12345678")


def _host_context() -> SpawnContext | ForkServerContext:
    """The multiprocessing context of host workers: forks of a server that has loaded torch.

    Loading torch takes seconds of a core, and a tune has several workers: the main one, its spare,
    and those that verify winners. The server starts with the first of them and ends with this
    process. If the path of the temporary folder is too long for the server's socket, workers are
    spawned instead.
    """
    folder_bytes = len(os.fsencode(tempfile.gettempdir()))
    if folder_bytes + _SOCKET_NAME_BYTES > _MOST_SOCKET_BYTES:
        return _SPAWN
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # not kgen: workers find it as this process did
    return context


class Child:
    """A process that runs `worker_main`.

    It loads its modules at once, and opens the device when it receives the first message.

    Attributes:
        printed_bytes: Bytes written to stdout so far: kernels can print, kgen itself does not.
        printed_head: The first bytes written to stdout.
    """

    def __init__(self, setup: Setup) -> None:
        self._on_host = setup.on_host or setup.gpu.is_host
        context: SpawnContext | ForkServerContext = (
            _host_context() if self._on_host else _SPAWN
        )
        self.pipe, theirs = context.Pipe()
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._output, output = context.Pipe(duplex=False)
        self._complaints, complaints = context.Pipe(duplex=False)
        self._process = context.Process(
            target=worker_main,
            args=(theirs, lifeline, output, complaints, setup, dict(os.environ)),
            name="kgen-worker",
            daemon=True,
        )
        with _sigint_blocked():
            self._process.start()
        for end in (theirs, lifeline, output, complaints):
            end.close()
        self._open: list[connection.Connection] = [self._output, self._complaints]
        self._tail = b""
        self.printed_bytes = 0
        self.printed_head = b""

    @property
    def pid(self) -> int | None:
        """The process id."""
        return self._process.pid

    def poll(self, timeout_s: float) -> bool:
        """Wait for an answer, and meanwhile read what the process prints.

        A kernel that prints endlessly would otherwise fill the pipe and block, or fill the user's
        terminal. Returns False if there is no answer in time; the end of the process counts as an
        answer.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            ready = connection.wait([self.pipe, *self._open], max(0.0, left))
            for stream in [s for s in self._open if s in ready]:
                self._swallow(stream)
            if self.pipe in ready:
                return True
            if left <= 0:
                return False

    def drain(self) -> None:
        """Read all that was printed before the last answer."""
        while ready := connection.wait(self._open, 0):
            for stream in ready:
                assert isinstance(stream, connection.Connection)
                self._swallow(stream)

    def kill(self) -> None:
        """Kill the process without waiting: with an endless kernel on the GPU, its end takes long.

        On the host the process may be waiting for a sanitized program that never ends. So its whole
        process group is killed.
        """
        if self._on_host and self.pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # no process group yet, so no programs
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()

    def dismiss(self) -> None:
        """Ask the process to end, wait, and kill it if it does not."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self._join(5.0)
        self._close()

    def reap(self) -> str:
        """Wait for an ended or killed process, and describe how it ended."""
        self._join(10.0)
        with contextlib.suppress(OSError):
            self.drain()
        self._close()
        code = self._process.exitcode
        if code is not None and code < 0:
            text = f"the worker was ended by {signal.Signals(-code).name}"
        else:
            text = f"the worker ended with exit code {code}"
        said = self._tail.decode(errors="replace").strip().splitlines()
        return f"{text}; it said: {said[-1][:200]}" if said else text

    def _join(self, timeout_s: float) -> None:
        self._process.join(timeout=timeout_s)
        if self._process.is_alive():
            self.kill()
            self._process.join()

    def _close(self) -> None:
        for end in (self.pipe, self._lifeline, self._output, self._complaints):
            end.close()
        self._open = []

    def _swallow(self, stream: connection.Connection) -> None:
        data = os.read(stream.fileno(), 1 << 20)
        if not data:
            self._open.remove(stream)
        elif stream is self._output:
            self.printed_bytes += len(data)
            self.printed_head = (self.printed_head + data)[:_HEAD_BYTES]
        else:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT while a process starts, so that Ctrl-C cannot reach it before it is ready.

    A worker ignores Ctrl-C once it runs kgen's code, but Python takes 0.1 s to load that code.
    """
    resource_tracker.ensure_running()  # started here, because its start would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
