"""Two tiers of tests, one thread for torch, and less work for Python's garbage collector.

`make test` runs the quick tier, `make test-all` the full one as well. Tests below `QUICK_FOLDERS`
are of the quick tier and all others of the full one, unless `@pytest.mark.quick` or
`@pytest.mark.full` says otherwise. Tests marked `slow` are of neither.
"""

import gc
import os
from pathlib import Path

import pytest

# The tensors of tests are small: with several threads in each of pytest's processes torch mostly
# waits. Set before torch is imported; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
QUICK_FOLDERS = ("unit", "golden")


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_xdist_auto_num_workers() -> int | None:
    """One process more than there are cores: many tests wait for a worker or for a time limit."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test its tier."""
    for item in items:
        chosen = [tier for tier in ("quick", "full") if item.get_closest_marker(tier)]
        if not chosen and not item.get_closest_marker("slow"):
            folder = item.path.relative_to(TESTS).parts[0]
            item.add_marker("quick" if folder in QUICK_FOLDERS else "full")


def pytest_collection_finish() -> None:
    """Collections need not look at torch, sympy and thousands of tests again and again."""
    gc.collect()
    gc.freeze()
