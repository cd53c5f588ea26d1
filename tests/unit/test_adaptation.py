"""Configs of families for a call: the row's own, or the nearest that breaks no rule."""

from __future__ import annotations

from typing import Any

import pytest

from kgen.runtime.adaptation import adapted, named_values
from kgen.runtime.rows import Call, Family, Parameter, Rule, always

DEVICE = {"max_threads_per_block": 1024, "smem_per_block": 100_000}


def unused(*_: Any) -> Any:
    raise AssertionError("nothing is asked here")


def bind(file: Any, call: Call) -> Any:
    """A launch of `block` threads with 100 bytes of shared memory for each."""
    return file.launcher("rows", "p", block=(call.block, 1, 1), smem=100 * call.block)


def family(fits: Rule = always, suits: Rule = always, admits: Rule = always) -> Family:
    """Threads times rows of a block, and a flag."""
    return Family(
        name="rows", template="op/forward_rows.cu.jinja", constants=(), settings={},
        parameters=(Parameter("threads", (32, 64, 128, 256)), Parameter("rows", (1, 2, 4)),
                    Parameter("reverse", (False, True), default=False)),
        first=(), named={"block": lambda call: call.threads * call.rows}, is_safe=False,
        admits=(admits,), fits=(fits,), suits=(suits,), bind=bind,
    )


def test_a_config_that_breaks_no_rule_stays() -> None:
    found = adapted(family(), (128, 2, False), Call(N=64, **DEVICE))
    assert found is not None
    assert found.instance.config == "rows(threads=128, rows=2)"
    assert (found.suits, found.steps) == (True, 0)


def test_the_nearest_choice_replaces_one_that_breaks_a_rule() -> None:
    rule = family(fits=lambda call: call.block <= call.N)
    found = adapted(rule, (256, 1, False), Call(N=64, **DEVICE))
    assert found is not None
    assert (found.instance.values, found.steps) == ((64, 1, False), 2)


def test_two_parameters_change_where_one_does_not_suffice() -> None:
    rule = family(fits=lambda call: call.block == 32 and call.reverse == 1)
    found = adapted(rule, (32, 2, False), Call(N=1, **DEVICE))
    assert found is not None
    assert found.instance.config == "rows(threads=32, rows=1, reverse=true)"
    found = adapted(rule, (64, 2, False), Call(N=1, **DEVICE))
    assert found is None  # three would have to change at once


def test_a_config_worth_a_trial_goes_before_one_that_is_nearer() -> None:
    rule = family(fits=lambda call: call.block <= 128, suits=lambda call: call.rows == 4)
    found = adapted(rule, (128, 1, False), Call(N=1, **DEVICE))
    assert found is not None
    assert (found.instance.values, found.suits) == ((32, 4, False), True)
    rule = rule._replace(suits=(lambda call: False,))
    found = adapted(rule, (256, 1, False), Call(N=1, **DEVICE))
    assert found is not None
    assert (found.instance.values, found.suits) == ((128, 1, False), False)


def test_a_config_that_the_device_cannot_launch_is_changed() -> None:
    small = {**DEVICE, "smem_per_block": 100 * 128}
    found = adapted(family(), (256, 1, False), Call(N=64, **small))
    assert found is not None
    assert (found.instance.values, found.steps) == ((128, 1, False), 1)
    few = {**DEVICE, "max_threads_per_block": 64}
    found = adapted(family(), (32, 4, False), Call(N=64, **few))
    assert found is not None
    assert (found.instance.values, found.steps) == ((32, 2, False), 1)
    none = {**DEVICE, "smem_per_block": 100}
    assert adapted(family(), (32, 1, False), Call(N=64, **none)) is None


def test_many_parameters_change_one_after_the_other() -> None:
    rules = family()._replace(fits=(
        lambda call: call.threads == 32, lambda call: call.rows == 4,
        lambda call: call.reverse == 1))
    found = adapted(rules, (256, 1, False), Call(N=1, **DEVICE))
    assert found is not None
    assert (found.instance.values, found.steps) == ((32, 4, True), 6)
    assert adapted(rules, (256, 1, False), Call(N=1, **DEVICE), most_changes=2) is None


def test_a_family_that_no_config_admits_is_left_at_once() -> None:
    assert adapted(family(fits=unused, admits=lambda call: call.N > 8), (32, 1, False),
                   Call(N=8, **DEVICE)) is None


def test_a_rule_that_divides_by_zero_does_not_hold() -> None:
    rule = family(fits=lambda call: call.N % call.zero == 0)
    assert adapted(rule, (32, 1, False), Call(N=8, zero=0)) is None


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ("rows(threads=64, rows=2)", (64, 2, False)),
        ("rows(threads=64, rows=2, reverse=true)", (64, 2, True)),
        ("rows(threads=64)", None),  # rows has no default
        ("rows(threads=65, rows=2)", None),
        ("rows(threads=64, rows=2, stages=3)", None),
        ("columns(threads=64, rows=2)", None),
        ("rows", None),
    ],
)
def test_a_rows_config_is_read_if_the_family_has_it(
    config: str, values: tuple[object, ...] | None
) -> None:
    assert named_values(family(), config) == values
