"""The number of threads for the small matrices of the search."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Use one thread for numpy's linear algebra inside the block.

    The model's matrices have at most a few hundred rows. Threads save little there, wait for each
    other in busy loops, and take the cores of compilers and of other searches. Two searches on two
    cores made 38 trials a second with all threads and 51 with one each.
    """
    with _blas().limit(limits=1):
        yield


@functools.cache
def _blas() -> ThreadpoolController:
    """The loaded linear-algebra libraries; the caller must have imported numpy."""
    return ThreadpoolController().select(user_api="blas")
