"""A proof skips the input sets whose grid barriers need more resident CTAs than the GPU has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from kgen.catalogue import open_catalogue, profile_named
from kgen.launch import Module
from kgen.model.plan import Launch, Plan, make_plan
from kgen.model.problem import parse_problem
from kgen.worker.proof import has_room


class TwoPerSm(Module):
    """A module of which two blocks of any kernel fit on an SM."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def bind(
        self, plan: Plan, tensors: object, numbers: Mapping[str, int | float]
    ) -> Callable[[], None]:
        raise NotImplementedError

    def occupancy(self, kernel: str, threads: int, smem_bytes: int) -> int:
        self.asked.append((kernel, threads, smem_bytes))
        return 2

    def close(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("blocks", "sm_count", "fits"), [(264, 132, True), (265, 132, False), (0, 0, True)])
def test_blocks_that_wait_for_each_other_fit_at_once(
    blocks: int, sm_count: int, fits: bool
) -> None:
    waiting = Launch("waits", (blocks, 1, 1), (64, 1, 1), 100, (), coresident=True)
    others = Launch("others", (10**6, 1, 1), (64, 1, 1), 0, ())
    module = TwoPerSm()
    assert has_room(module, [others, waiting], sm_count) == fits
    assert module.asked == [("waits", 64, 100)] * (blocks > 0)


def test_split_t_of_more_heads_does_not_fit() -> None:
    """The variant of the committed rows: a batch row more, and there is no room on an H200."""
    entry, gpu = open_catalogue().entry("linear_attention"), profile_named("h200")
    variant = entry.space.variant("forward", "split_t")
    config = variant.first[0]
    rows = {}
    for batch in (1, 64):
        problem = parse_problem(
            f"B={batch},H=8,T=4096,E=128,M=128,dtype=bf16", entry.operator.signature)
        launches = make_plan(variant, config, problem, gpu).launches
        rows[batch] = has_room(TwoPerSm(), launches, gpu.sm_count)
    assert rows == {1: True, 64: False}
