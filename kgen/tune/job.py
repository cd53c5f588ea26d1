"""`kgen tune` as a whole: tune, and publish the problems that are confirmed."""

from __future__ import annotations

import os
import time
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


# Largest share of a tune's time that is spent on writing the library. Writing a library of ten
# operators takes seconds, and a population of 180 problems is searched in minutes.
PUBLISHING_SHARE = 0.1

PublishEvent: TypeAlias = TuneEvent | PassPublished


def tune_and_publish(
    request: TuneRequest, out: Path, reports: Path
) -> Generator[PublishEvent, None, None]:
    """Tune pass after pass; publish each problem once it is confirmed.

    No trials run while the library is written, so it is written only as often as a small share of
    the time allows (`PUBLISHING_SHARE`). A tune that is killed therefore leaves a library that may
    lack the problems confirmed in the last seconds. A tune that ends early by a signal or an error
    publishes these, too, and the safe kernels certified since. Other rows and reports stay
    unchanged.

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
    is_row_waiting = False  # safe kernels without a new row are only published at the end
    next_s = 0.0  # earliest time of the next publication, as of `time.monotonic`
    try:
        with closing(tune(request)) as events:
            for event in events:
                if isinstance(event, SafeCertified | ProblemConfirmed):
                    unpublished = event.so_far
                    is_row_waiting = is_row_waiting or isinstance(event, ProblemConfirmed)
                    # the last problem is published at `PassDone`
                    is_row_waiting = is_row_waiting and not unpublished.is_whole
                began_s = time.monotonic()
                if is_row_waiting and unpublished is not None and began_s >= next_s:
                    publish(unpublished, out, reports)
                    unpublished, is_row_waiting = None, False
                    ended_s = time.monotonic()
                    next_s = ended_s + (ended_s - began_s) * (1 / PUBLISHING_SHARE - 1)
                yield event
                if isinstance(event, PassDone):
                    published = publish(event.result, out, reports)
                    unpublished, is_row_waiting = None, False
                    yield PassPublished(event.result, published)
    finally:
        if unpublished is not None:
            publish(unpublished, out, reports)


def check_folder_writable(folder: Path) -> None:
    """Make the output folder before the tune, so that the tune can write its results.

    Raises:
        StorageError: If the folder cannot be made or written.
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
