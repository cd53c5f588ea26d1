"""`--devices`: one process per device of this machine.

The first device of a GPU model is the tuner's: it makes the finals. Each other device of the model
gets a `kgen worker`. Another model gets a `kgen tune` of its own, side by side.
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
_IDLE_S = 60.0  # a worker whose tuner was killed ends then
_END_S = 60.0  # a worker finishes its trial first


def asked_devices(options: argparse.Namespace) -> tuple[argparse.Namespace, list[list[str]]]:
    """Resolve `--devices`.

    Returns:
        The options with the tuner's `gpu`, `device`, and the other devices of its model as
        `workers`; and the command lines that tune the other models.
    Raises:
        GpuError: If a device is not there.
    """
    if options.devices is None:
        return argparse.Namespace(**{**vars(options), "workers": ()}), []
    chosen = None if options.devices == ALL else options.devices
    (first, mine), *others = select_devices(options.gpu, chosen).items()
    tuner = {"gpu": first.name, "device": mine[0], "workers": tuple(mine[1:])}
    commands = [
        # The last of an option that is given twice counts.
        [sys.executable, "-m", "kgen", *sys.argv[1:], "--gpu", profile.name, "--devices",
         ",".join(map(str, ordinals))]
        for profile, ordinals in others
    ]
    return argparse.Namespace(**{**vars(options), **tuner}), commands


@contextmanager
def side_by_side(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run commands beside the block; they are ended if the block fails, else waited for."""
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
    """The study's file as the storage of processes of this machine."""
    return parse_storage(f"journal://{request.study.resolve()}")


@contextmanager
def workers_beside(
    request: TuneRequest, options: argparse.Namespace
) -> Iterator[None]:
    """Run a `kgen worker` for each of the other devices; they end with the block.

    Args:
        request: The tune, with its storage.
        options: Of the command: `workers`, and what the workers have in common with the tune. On
            one machine all write to its journal.
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
    # The URL travels in the environment: it may hold a password.
    environment = {**os.environ, "KGEN_STORAGE": shared.url.text, HELPER: "1"}
    # A session of its own: Ctrl-C is the tuner's, which then ends the workers.
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
