"""`kgen tune` as a whole: tune, and publish each problem as soon as it is confirmed."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kgen.errors import StorageError
from kgen.tune.engine import tune
from kgen.tune.events import PassDone, ProblemConfirmed, SafeCertified, TuneEvent
from kgen.tune.publish import Published, publish
from kgen.tune.request import TuneRequest
from kgen.tune.results import PassResult


@dataclass(frozen=True, slots=True)
class PassPublished:
    """A pass has ended; its results are in the library and in the report."""

    result: PassResult
    published: Published


PublishEvent: TypeAlias = TuneEvent | PassPublished


def tune_and_publish(
    request: TuneRequest, out: Path, reports: Path
) -> Generator[PublishEvent, None, None]:
    """Tune pass after pass; publish each problem once it is confirmed.

    A tune that is killed leaves a library with the problems confirmed so far. One that ends early,
    by a signal or an error, publishes the safe kernels that were certified since, too. Other rows
    and reports stay unchanged.

    Args:
        request: The tune.
        out: Folder of the library.
        reports: Folder of the operator's reports.
    Yields:
        The events of `tune`, and `PassPublished` after each `PassDone`.
    Raises:
        StorageError: If the output folder cannot be written; checked before any trial.
        TuneError, WorkerError, UserError: See `tune`.
    """
    check_folder_writable(reports)
    unpublished: PassResult | None = None
    try:
        with closing(tune(request)) as events:
            for event in events:
                if isinstance(event, SafeCertified):
                    unpublished = event.so_far
                # the last problem is published at `PassDone`
                elif isinstance(event, ProblemConfirmed):
                    unpublished = event.so_far
                    if not event.so_far.is_whole:
                        publish(event.so_far, out, reports)
                        unpublished = None
                yield event
                if isinstance(event, PassDone):
                    published = publish(event.result, out, reports)
                    unpublished = None
                    yield PassPublished(event.result, published)
    finally:
        if unpublished is not None:
            publish(unpublished, out, reports)


def check_folder_writable(folder: Path) -> None:
    """Make the output folder before the tune, so that the tune can write its results.

    Raises:
        StorageError: If it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise StorageError(
            f"{folder}: the output folder cannot be made: {problem.strerror}\n"
            "  choose another with --out DIR"
        ) from None
    if not os.access(folder, os.W_OK):
        raise StorageError(
            f"{folder}: no permission to write\n  choose another output folder with --out DIR"
        )
