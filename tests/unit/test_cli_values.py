"""Options that no tune could work with are refused when they are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from kgen.cli.arguments import (
    check_output,
    count,
    devices,
    duration,
    given_text,
    memory_size,
    names,
    positive,
    seed_number,
)
from kgen.errors import StorageError


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
        (duration, "\N{ARABIC-INDIC DIGIT THREE}s"),
        (memory_size, "-1G"),
        (memory_size, "9" * 400),
        (count, "-1"),
        (count, "9" * 5000),
        (count, "\N{ARABIC-INDIC DIGIT THREE}"),
        (positive, "0"),
        (positive, "nan"),
        (devices, "9" * 400),
        (devices, "0,0"),
        (names, "," * 400),
        (given_text, " "),
    ],
)
def test_values_out_of_range(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        read(text)
    assert len(str(caught.value)) < 200


def test_a_file_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path, tmp_path / "file" / "x.yaml"):
        with pytest.raises(StorageError, match=r"--yaml .*\n  next: name a file"):
            check_output("--yaml", str(wrong))
    for right in (None, str(tmp_path / "file"), str(tmp_path / "new" / "x.yaml")):
        check_output("--yaml", right)


def test_values_in_range() -> None:
    assert seed_number("7") == 7
    assert (count("0"), positive("3"), devices("1,0")) == (0, 3, (1, 0))
    assert duration("5m") == 300.0
    assert memory_size("9" * 400 + "G") == 2**62
