"""Two tiers of tests, one thread for torch, and less work for Python's garbage collector.

`make test` runs the quick tier; `make test-all` also runs the full tier. Tests below
`QUICK_FOLDERS` are in the quick tier and all others in the full tier, unless `@pytest.mark.quick`
or `@pytest.mark.full` says otherwise. Tests marked `slow` are in neither tier.
"""

import gc
import os
from pathlib import Path

import pytest

# The tensors of tests are small: with several threads in each of pytest's processes torch would
# mostly wait. The variable is set before torch is imported; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
QUICK_FOLDERS = ("unit", "golden")


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_auto_num_workers() -> int | None:
    """Cores plus one: many tests wait for a worker process or for a time limit."""
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
    """Exclude torch, sympy and thousands of tests from later garbage collections."""
    gc.collect()
    gc.freeze()
