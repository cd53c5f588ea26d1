"""A group while its rule is learnt: which configs get rows, where, and what refusals change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kgen.catalogue import open_catalogue, profile_named
from kgen.learn.grid import group_problems
from kgen.learn.group import GroupWork
from kgen.model.config import Config, Value
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate, Record, Timing
from kgen.model.rule_tree import Leaf, Split
from kgen.model.space import RuleKind
from kgen.search.feasible import refusing_rule

ENTRY = open_catalogue().entry("rmsnorm")
BASE: dict[str, Value] = {
    "lanes_per_row": 128, "groups_per_block": 1, "rows_per_group": 1, "vec": 8,
    "weight_load": "before_reduction",
    "persistent": False, "prefetch": False, "load_cache": "normal", "store_cache": "normal",
    "min_blocks": 1,
}
OLD, NEW, WORSE = (Config.of("rows_in_registers", {**BASE, "load_cache": cache})
                   for cache in ("normal", "evict_last", "no_l1"))
ROWS = (16, 64, 256, 1024, 4096, 16384)


def problem(m: int) -> Problem:
    return parse_problem(f"M={m},N=4096,dtype=bf16", ENTRY.operator.signature)


def record(config: Config, m: int, us: float) -> Record:
    return Record(f"{m}", "rmsnorm", "forward", str(problem(m)), "h200", config, Fate.VERIFIED,
                  timing=Timing(us, us, us, 9, "test"))


@pytest.fixture
def work() -> GroupWork:
    """`old` has a row at M = 16; `new` takes half of its time from M = 1024 on."""
    session: Any = SimpleNamespace(
        entry=ENTRY, pass_name="forward", gpu=profile_named("h200"),
        variant_of=lambda config: ENTRY.space.variant("forward", config.variant),
    )
    (group,) = group_problems([problem(16)], ("N",))
    made = GroupWork(
        group=group, session=cast(Any, session), configs=(OLD, NEW, WORSE),
        records={OLD.digest: "old"}, kept=frozenset({OLD.digest}), tuned={problem(16): OLD},
        taken=frozenset({problem(16)}), problems=tuple(map(problem, ROWS)),
    )
    for m in ROWS:
        fast = m >= 1024
        times = {OLD: 10.0, NEW: (5.0 if m > 1024 else 5.6) if fast else 12.0,
                 WORSE: 5.5 if fast else 13.0}
        made.tried[problem(m)] = {c.digest: record(c, m, us) for c, us in times.items()}
    return made


def test_a_preferred_config_gets_a_row_where_it_is_best(work: GroupWork) -> None:
    ((at, trial),) = work.wanted()
    assert trial.config == NEW
    assert at == problem(4096)  # of those that it is to serve, the first at which it is the best
    work.decide(at, trial, "new")
    assert work.wanted() == []
    rule = work.rule()
    assert rule.tree == Split(("M",), 510, Leaf(("old",)), Leaf(("new", "old")))
    assert (rule.constants, rule.problems) == ((("N", 4096),), 6)
    assert rule.worst_loss == pytest.approx(5.6 / 5.5 - 1, abs=1e-4)
    told = work.report(["new", "of another group"])
    assert told.new_rows == ("new",)
    assert [entry.loss > 0 for entry in told.training] == [m == 1024 for m in ROWS]


def test_the_next_best_follows_a_refused_one(work: GroupWork) -> None:
    ((at, trial),) = work.wanted()
    work.decide(at, trial, None)
    ((at, trial),) = work.wanted()
    assert trial.config == WORSE
    work.decide(at, trial, None)
    assert work.wanted() == []
    assert work.rule().tree == Leaf(("old",))


def test_a_new_row_does_not_take_the_place_of_another(work: GroupWork) -> None:
    """Where all problems that a config would serve have rows, it cannot have one."""
    work.taken |= {problem(m) for m in ROWS}
    assert work.wanted() == []
    assert work.rule().records == {"old"}


def test_choice_and_nearest(work: GroupWork) -> None:
    for _ in range(2):  # before the new row is there, and after
        assert work.choice(problem(100)) == OLD
        assert work.choice(problem(2000)) == NEW
        assert work.nearest(problem(2000)) == OLD
        for at, trial in work.wanted():
            work.decide(at, trial, "new")


def test_where_the_rule_has_no_fitting_row_the_nearest_of_all_serves(
    work: GroupWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.learnt[problem(64)] = WORSE
    monkeypatch.setattr(GroupWork, "is_feasible", lambda self, config, problem: config == WORSE)
    assert work.choice(problem(100)) == WORSE
    assert work.nearest(problem(100)) is None
    monkeypatch.setattr(GroupWork, "is_feasible", lambda self, config, problem: False)
    assert work.choice(problem(100)) is None


def test_searches_go_where_least_is_known(work: GroupWork) -> None:
    assert work.outlying([]) == problem(16384)
    assert work.outlying([problem(16384)]) in (problem(256), problem(1024))
    assert work.outlying([problem(m) for m in ROWS]) is None


def test_a_row_serves_what_it_is_right_for_if_not_worth_a_trial(work: GroupWork) -> None:
    """As in the library: rules of efficiency keep no row from a call."""
    idle = Config.of("rows_in_registers", {**BASE, "persistent": True})
    pass_ = ENTRY.operator.signature.pass_named("forward")
    variant = ENTRY.space.variant("forward", "rows_in_registers")
    few = problem(64)
    refusal = refusing_rule(variant, idle, pass_, few, profile_named("h200"))
    assert refusal is not None
    assert refusal.kind is RuleKind.EFFICIENCY
    work.tuned = {problem(16384): idle}
    assert work.nearest(few) == idle
    illegal = Config.of("rows_in_registers", {**BASE, "lanes_per_row": 1024, "groups_per_block": 8})
    assert not work.is_feasible(illegal, few)
