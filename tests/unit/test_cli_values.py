"""Options that no tune could work with are refused when they are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from kgen.cli.arguments import duration, memory_size, seed_number


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (seed_number, "-1"),
        (seed_number, "2147483648"),
        (seed_number, "9" * 5000),
        (seed_number, "1.5"),
        (duration, "9" * 400),
        (duration, "0"),
        (duration, "1e9h"),
        (memory_size, "-1G"),
    ],
)
def test_values_out_of_range(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        read(text)
    assert len(str(caught.value)) < 200


def test_values_in_range() -> None:
    assert seed_number("7") == 7
    assert duration("5m") == 300.0
    assert memory_size("9" * 400 + "G") == 2**62
