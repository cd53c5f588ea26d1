"""Configs of families for a call: the row's own, or the nearest that breaks no rule."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest

from kgen.runtime.adaptation import (
    MOST_CHANGES,
    Adapted,
    FamilyRules,
    named_values,
    with_values,
)
from kgen.runtime.rows import Call, Family, Parameter, Rule, Value, always

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


def adapted(
    rules: Family, start: tuple[Value, ...], call: Call, most_changes: int = MOST_CHANGES
) -> Adapted | None:
    return FamilyRules(rules, call).adapted(start, most_changes)


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


def test_only_parameters_that_a_broken_rule_reads_are_changed() -> None:
    asked: list[tuple[int, int, object]] = []

    def few_threads(call: Call) -> bool:
        asked.append((call.threads, call.rows, call.__dict__.get("reverse")))  # reads two
        return call.block <= 0

    rules = family(suits=few_threads)._replace(
        fits=(lambda call: call.reverse == 0 or call.threads > 0,))
    found = adapted(rules, (32, 1, False), Call(N=1, **DEVICE))
    assert found is not None
    assert (found.steps, found.suits) == (0, False)
    assert (64, 1, True) in asked
    assert (32, 1, True) not in asked
    asked.clear()

    def reads_none(call: Call) -> bool:
        asked.append((call.N, 0, False))
        return False

    blameless = family(suits=reads_none)
    assert adapted(blameless, (32, 1, False), Call(N=1, **DEVICE)) is not None
    assert len(asked) <= 2, "no change of a parameter mends a rule that reads none"


def slow_adapted(
    rules: Family, start: tuple[Value, ...], call: Call, most_changes: int
) -> tuple[tuple[Value, ...], int] | None:
    """The search as its docstring has it: every config, every rule."""
    def broken(values: tuple[Value, ...]) -> int:
        full = with_values(call, rules, values)
        wrong = sum(not rule(full) for rule in rules.fits)
        is_too_large = not wrong and full.block > full.max_threads_per_block
        return 1000 * (wrong + is_too_large) + sum(not rule(full) for rule in rules.suits)

    def steps(values: tuple[Value, ...]) -> int:
        return sum(abs(p.choices.index(a) - p.choices.index(b))
                   for p, a, b in zip(rules.parameters, start, values, strict=True))

    every = list(product(*(parameter.choices for parameter in rules.parameters)))
    def changed(values: tuple[Value, ...], other: tuple[Value, ...]) -> list[int]:
        return [place for place, (a, b) in enumerate(zip(values, other, strict=True)) if a != b]

    best = start
    for _ in range(most_changes):
        for count in (1, 2):
            near = [v for v in every if len(changed(v, best)) == count]
            found = min(near, key=lambda v: (broken(v), steps(v), changed(v, best)))
            if broken(found) < broken(best):
                best = found
                break
        else:
            break
    return None if broken(best) >= 1000 else (best, broken(best))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_left_out_of_the_search_changes_no_result(seed: int) -> None:
    """No config is judged twice or further than its first refusal, and few are judged at all."""
    random = Random(seed)

    def rule(names: tuple[str, ...]) -> Rule:
        allowed = {key for key in product(*(range(9) for _ in names)) if random.random() < 0.6}
        return lambda call: tuple(getattr(call, name) % 9 for name in names) in allowed

    names = ("threads", "rows", "reverse", "block", "N")
    rules = family()._replace(
        fits=tuple(rule(tuple(random.sample(names, random.randint(1, 3)))) for _ in range(3)),
        suits=tuple(rule(tuple(random.sample(names, random.randint(1, 3)))) for _ in range(3)))
    device = Call(N=random.randint(1, 8), max_threads_per_block=256, smem_per_block=100_000)
    judge = FamilyRules(rules, device)
    for start in product(*(parameter.choices for parameter in rules.parameters)):
        for most in (0, 1, 6):
            expected = slow_adapted(rules, start, device, most)
            found = judge.adapted(start, most)
            if expected is None:
                assert found is None
            else:
                assert found is not None
                assert (found.instance.values, not found.suits) == (expected[0], expected[1] > 0)


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
