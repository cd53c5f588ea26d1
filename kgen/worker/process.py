"""The worker's side: answer requests until told to stop or until the device context is lost."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from kgen.catalogue import open_catalogue
from kgen.errors import KgenError, VerifyError
from kgen.worker.messages import Failure, Finals, PeerNames, Probe, Setup, Trial


def worker_main(pipe: Connection, setup: Setup) -> None:
    """Entry point of the worker process."""
    # Ctrl-C is the parent's to handle: it finishes or drops the trial, then ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # Imported here: the parent imports this module for its name only, without torch.
        from kgen.worker.runner import Runner

        operator = open_catalogue(setup.paths).operator(setup.operator)
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
                case Trial():
                    answer = runner.trial(request)
                case Finals():
                    answer = runner.finals(request)
                case _:
                    raise TypeError(f"not a request: {request!r}")
        except Exception as problem:  # a fault of any kind is an outcome here, never a silence
            text = (
                str(problem)
                if isinstance(problem, KgenError)
                else (f"{type(problem).__name__}: {problem}")
            )
            fatal = not runner.usable()
            pipe.send(Failure(text, fatal, operator=isinstance(problem, VerifyError)))
            if fatal:
                pipe.close()
                os._exit(3)  # a poisoned CUDA context can hang in its own destructors
            continue
        pipe.send(answer)
