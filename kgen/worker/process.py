"""The worker process: answer requests until told to stop or until the device context is lost."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection

from kgen.catalogue import open_catalogue
from kgen.errors import KgenError, LaunchRefusedError, VerifyError
from kgen.worker.messages import (
    CallCosts,
    Failure,
    Finals,
    PeerNames,
    Probe,
    SetBegun,
    Setup,
    Trace,
    Trial,
)


def worker_main(
    pipe: Connection,
    lifeline: Connection,
    output: Connection,
    complaints: Connection,
    setup: Setup,
    environment: Mapping[str, str],
) -> None:
    """Entry point of the worker process.

    Args:
        pipe: Receives requests and sends answers. The first message is the permission to open the
            device: a spare worker has loaded its modules and waits for it.
        lifeline: A pipe that closes when the parent ends, for whatever reason.
        output: Replaces stdout, to which kernels may print.
        complaints: Replaces stderr, where a crash writes its message.
        setup: The setup of the coming trials.
        environment: The parent's environment; the fork server's may be out of date.
    """
    if setup.on_host or setup.gpu.is_host:
        os.setpgid(0, 0)  # a process group, so that its programs end with it: see `Child.kill`
    os.environ.clear()
    os.environ.update(environment)
    # The parent handles Ctrl-C: it finishes or drops the trial, then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the parent has blocked it
    os.dup2(output.fileno(), 1)
    os.dup2(complaints.fileno(), 2)
    # Output of Python code (a definition, for example) goes to stderr; kernels write to stdout
    # without Python.
    sys.stdout = sys.stderr
    threading.Thread(target=_follow, args=(lifeline,), daemon=True, name="kgen-lifeline").start()
    try:
        # Imported here: the parent imports this module for its name only, without torch.
        from kgen.worker.runner import Runner

        operator = open_catalogue(setup.paths).operator(setup.operator)
        if not _received_stop(pipe):
            return
        if setup.on_host or setup.gpu.is_host:
            _limit_process(setup.memory_bytes)
        runner = Runner(operator, setup)
    except KgenError as problem:
        pipe.send(Failure(str(problem), fatal=True))
        return
    pipe.send("ready")
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request is None:
            return
        try:
            match request:
                case Probe():
                    answer: object = runner.probe()
                case PeerNames():
                    answer = runner.peer_names(request)
                case Trial(part=None):
                    answer = runner.trial(request)
                case Trial():
                    answer = runner.trial(request, lambda place: pipe.send(SetBegun(place)))
                case Finals():
                    answer = runner.finals(request)
                case Trace():
                    answer = runner.trace(request)
                case CallCosts():
                    answer = runner.call_costs(request)
                case _:
                    raise TypeError(f"not a request: {request!r}")
        except SystemExit as problem:
            answer = Failure(
                f"{setup.operator}: a function of the operator's module called "
                f"sys.exit({problem.code!r})\n  next: raise an error there",
                fatal=False,
                operator=True,
            )
        except Exception as problem:  # every error must be reported to the parent
            text = (
                str(problem)
                if isinstance(problem, KgenError)
                else (f"{type(problem).__name__}: {problem}")
            )
            fatal = not runner.usable()
            answer = Failure(
                text,
                fatal,
                operator=isinstance(problem, VerifyError),
                refused=isinstance(problem, LaunchRefusedError) and not fatal,
            )
        # Kernels' output may still be in C's stdout buffer; the parent reads it with the answer.
        ctypes.CDLL(None).fflush(None)
        pipe.send(answer)
        if isinstance(answer, Failure) and answer.fatal:
            pipe.close()
            os._exit(3)  # the destructors of a corrupt CUDA context can hang


def _follow(lifeline: Connection) -> None:
    """End this process when the parent ends, so that no endless kernel is left behind."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _received_stop(pipe: Connection) -> bool:
    try:
        return pipe.recv() is not None
    except EOFError:
        return False


def _limit_process(memory_bytes: int | None) -> None:
    """Limit the process's memory on the host, so that allocations beyond the limit fail."""
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
