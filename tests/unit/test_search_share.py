"""The part of a feasible set from which a process of a joint tune proposes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import optuna
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from kgen.model.config import Config
from kgen.search.encoding import Encoding
from kgen.search.membership import Member
from kgen.search.proposer import Proposer
from kgen.search.sampler import FeasibleSampler
from kgen.search.scoring import Mask
from kgen.search.share import WHOLE, Share, share_of
from kgen.tune.joint import Joint

CONFIGS = [
    Config.of("rows", {"threads": threads, "vec": vec, "unroll": unroll})
    for threads in (32, 64, 128, 256) for vec in (1, 2, 4, 8) for unroll in range(8)
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "processes", "ahead", "expected"),
    [
        (0, 1, 24, WHOLE),
        (1, 2, 24, Share(1, 2)),
        (15, 16, 2, Share(15, 16)),
        (17, 20, 3, Share(1, 16, 6)),
        (999, 1000, 2, Share(7, 16, 32)),
    ],
)
def test_few_processes_have_parts_of_their_own_and_many_draw(
    place: int, processes: int, ahead: int, expected: Share
) -> None:
    assert share_of(place, processes, ahead) == expected


def test_the_processes_at_one_study_have_different_parts() -> None:
    at = {"ann": "s", "bob": "another", "cid": "s", "dan": "s"}
    members = [Member(name, number, {"at": at[name]}) for number, name in enumerate(at)]

    def share(name: str, number: int, known: list[Member]) -> Share:
        membership = SimpleNamespace(id=name, number=number, members=lambda: known)
        joint = Joint(cast("Any", None), cast("Any", None), cast("Any", membership), False)
        return joint.share("s", wanted=100)

    shares = [share(m.id, m.number, members) for m in members if at[m.id] == "s"]
    assert shares == [Share(0, 3), Share(1, 3), Share(2, 3)]
    # A process that the last look at the members did not show is one of them all the same.
    assert share("cid", 2, [m for m in members if m.id != "cid"]) == Share(1, 3)
    assert share("eve", 4, []) == WHOLE


@pytest.mark.parametrize("parts", [1, 2, 3, 16])
def test_parts_are_about_equal_and_have_all_values_of_each_parameter(parts: int) -> None:
    encoding = Encoding(CONFIGS)
    masks = [Share(place, parts).members(len(encoding)) for place in range(parts)]
    assert (np.sum(masks, axis=0) == 1).all()
    if parts <= 3:
        for mask in masks:
            assert abs(int(mask.sum()) - len(encoding) / parts) < 0.2 * len(encoding)
            for column in range(len(encoding.columns)):
                assert len(set(encoding.codes[mask, column])) == len(encoding.choices[column])


def test_a_part_is_left_only_when_nothing_of_it_is_free() -> None:
    encoding = Encoding(CONFIGS)
    part = Share(0, 2).members(len(encoding))
    proposer = Proposer(encoding, 0, first=[0, 1, 2, 3])
    size = int(part.sum())
    mine: list[int] = []
    while len(mine) < size:
        new = proposer.propose(min(8, size - len(mine)), part)
        for i in new:
            proposer.tell(i, 10.0 + i)
        mine += new
    assert part[mine].all()
    assert set(mine) >= {i for i in range(4) if part[i]}
    others = proposer.propose(6, part)
    assert len(others) == 6
    assert not part[others].any()
    assert set(others) >= {i for i in range(4) if not part[i]}  # `first` of the rest goes first


def test_two_processes_with_the_same_results_propose_no_config_twice() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    proposed = [
        set(FeasibleSampler(CONFIGS, seed=7, first=CONFIGS[:6]).propose(study, 20, Share(place, 2)))
        for place in range(2)
    ]
    assert len(proposed[0]) == len(proposed[1]) == 20
    assert not proposed[0] & proposed[1]
    assert set(CONFIGS[:6]) <= proposed[0] | proposed[1]


def test_the_search_takes_one_thread_of_linear_algebra_and_gives_the_others_back(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    seen: list[set[int]] = []
    spread = Proposer._spread

    def noted(self: Proposer, free: Mask, rng: np.random.Generator) -> int:
        seen.append(threads())
        return spread(self, free, rng)

    monkeypatch.setattr(Proposer, "_spread", noted)
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        Proposer(Encoding(CONFIGS), 0).propose(2)
        assert threads() == before == {2}
    assert seen == [{1}, {1}]
