"""Select the cases of a test that are in the test tiers; the others are slow tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def one_of(every: int, cases: Sequence[Any]) -> list[Any]:
    """The cases as parameters; every `every`-th case, from the first on, is in the tiers."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)),
                     marks=[pytest.mark.slow] if place % every else [])
        for place, case in enumerate(cases)
    ]
