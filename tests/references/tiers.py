"""Which of many cases of one test the tiers have; the others are slow tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def one_of(every: int, cases: Sequence[Any]) -> list[Any]:
    """The cases as parameters: each `every`-th is in the tiers, beginning with the first."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)),
                     marks=[pytest.mark.slow] if place % every else [])
        for place, case in enumerate(cases)
    ]
