"""The coordinates that configs have in the search's model."""

from __future__ import annotations

import pytest

from kgen.model.config import Config
from kgen.search.encoding import Encoding


def encoding(*values: int | float) -> Encoding:
    return Encoding(Config.of("v", {"threads": value}) for value in values)


def test_sizes_between_powers_of_two_have_a_coordinate_for_how_often_they_can_be_halved() -> None:
    found = encoding(16, 48, 64, 128)
    ranks, twos = found.features.T.tolist()
    assert ranks == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert twos == pytest.approx([4 / 7, 4 / 7, 6 / 7, 1])
    assert found.groups.tolist() == [0, 1]  # each has a length scale of its own


def test_powers_of_two_alone_have_their_rank_alone() -> None:
    assert encoding(16, 32, 64, 128).features.shape == (4, 1)


def test_few_choices_and_numbers_that_are_no_sizes_have_no_such_coordinate() -> None:
    assert encoding(3, 4, 6).features.shape == (3, 1)
    assert encoding(0.5, 1.5, 2.5, 3.5).features.shape == (4, 1)
    assert encoding(-3, 6, 12, 20).features.shape == (4, 1)
    assert encoding(3, 5, 7, 9).features.shape == (4, 1)


def test_a_config_without_the_parameter_lies_in_the_middle() -> None:
    configs = [Config.of("v", {"threads": size}) for size in (16, 48, 64, 128)]
    found = Encoding([*configs, Config.of("w", {"other": 1})])
    assert found.features[4, :2].tolist() == [0.5, 0.5]
