"""`--devices`: one process per device of this machine.

The tuner uses the first device of a GPU model, and times the finals there. Each other device of the
model gets a `kgen worker`. Each further model gets a `kgen tune` of its own at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kgen.cli.helper_process import HELPER
from kgen.launch.select import select_devices
from kgen.search.storage import StorageUrl, parse_storage
from kgen.tune import SharedStorage, TuneRequest, forget_study_without_journal

ALL = "all"
_IDLE_S = 60.0  # idle time after which a worker whose tuner was killed ends
_END_S = 60.0  # time that a worker gets to finish its trial


def asked_devices(options: argparse.Namespace) -> tuple[argparse.Namespace, list[list[str]]]:
    """Resolve `--devices`.

    Returns:
        The options with the tuner's `gpu` and `device`, and with the other devices of its model as
        `workers`; then the command lines that tune the other models.
    Raises:
        GpuError: If a device does not exist.
    """
    if options.devices is None:
        return argparse.Namespace(**{**vars(options), "workers": ()}), []
    chosen = None if options.devices == ALL else options.devices
    (first, mine), *others = select_devices(options.gpu, chosen).items()
    tuner = {"gpu": first.name, "device": mine[0], "workers": tuple(mine[1:])}
    commands = [
        # Appended, because the last value of an option that is given twice counts.
        [sys.executable, "-m", "kgen", *sys.argv[1:], "--gpu", profile.name, "--devices",
         ",".join(map(str, ordinals))]
        for profile, ordinals in others
    ]
    return argparse.Namespace(**{**vars(options), **tuner}), commands


@contextmanager
def side_by_side(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run commands during the block; end them if the block fails, else wait for them."""
    running = [subprocess.Popen(command) for command in commands]
    try:
        yield running
        for process in running:
            process.wait()
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()


def shared_by_devices(request: TuneRequest, options: argparse.Namespace) -> TuneRequest:
    """The request with a storage that the workers of `--devices` can join."""
    if not options.workers or request.shared is not None:
        return request
    shared = SharedStorage(storage_of_one_host(request), options.grace, options.patience)
    return replace(request, shared=shared)


def storage_of_one_host(request: TuneRequest) -> StorageUrl:
    """The study's file as the storage that processes of this machine share."""
    return parse_storage(f"journal://{request.study.resolve()}")


@contextmanager
def workers_beside(
    request: TuneRequest, options: argparse.Namespace
) -> Iterator[None]:
    """Run a `kgen worker` for each of the other devices; the workers end with the block.

    Args:
        request: The tune, with its storage.
        options: Options of the command: `workers`, and the options that the workers share with the
            tune. On one machine all workers write to the tune's journal.
    """
    if not options.workers:
        yield
        return
    assert request.shared is not None
    forget_study_without_journal(request)  # before a worker opens the file
    with contextlib.ExitStack() as stack:
        for ordinal in options.workers:
            command = [
                sys.executable, "-m", "kgen", "worker", "--gpu", request.gpu.name,
                "--device", str(ordinal), "--out", str(options.out),
                "--grace", f"{request.shared.grace_s:g}",
                "--patience", f"{request.shared.patience_s:g}",
                "--idle", f"{_IDLE_S:g}",
            ]
            for path in request.paths:
                command += ["--path", path]
            if options.compile_timeout:
                command += ["--compile-timeout", f"{options.compile_timeout:g}"]
            if options.compile_memory:
                command += ["--compile-memory", f"{options.compile_memory >> 20}M"]
            stack.enter_context(_running(command, request.shared))
        yield


@contextmanager
def _running(command: Sequence[str], shared: SharedStorage) -> Iterator[None]:
    # The URL is passed in the environment, because it may hold a password.
    environment = {**os.environ, "KGEN_STORAGE": shared.url.text, HELPER: "1"}
    # In a session of its own: Ctrl-C reaches the tuner only, which then ends the workers.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
