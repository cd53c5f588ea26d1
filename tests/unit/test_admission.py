"""Which calls a candidate can take: those of its guards that fit a CTA's shared memory."""

from __future__ import annotations

import re

import pytest

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue, profile_named
from kgen.model.artifact import Artifact
from kgen.model.problem import parse_problem
from kgen.worker.binding import HOST_SMEM_BYTES, admission
from kgen.worker.messages import Candidate


def test_the_host_gives_what_its_layer_gives() -> None:
    text = (include_dir() / "kgen/host/thread.hpp").read_text(encoding="utf-8")
    found = re.search(r"kMaxSmemBytes = (\d+) \* (\d+);", text)
    assert found is not None
    assert int(found[1]) * int(found[2]) == HOST_SMEM_BYTES


@pytest.mark.parametrize("gpu", ["h200", "host"])
def test_a_call_that_needs_more_shared_memory_than_a_cta_has_is_refused(gpu: str) -> None:
    entry = open_catalogue().entry("timex")
    variant = entry.space.variant("forward", "register_tiles")
    values = {p.name: p.choices[0] for p in variant.params}
    candidate = Candidate(variant, variant.config(values), Artifact("host", "", "", (), 0.0))
    signature = entry.operator.signature
    admits = admission(candidate, profile_named(gpu), signature.pass_named("forward"))

    def admitted(steps: int) -> bool:
        names = parse_problem(f"B=2,C=3,T={steps},dtype=fp32", signature).names
        strides = {f"{t.name}_stride_{d}": 4 for t in signature.pass_named("forward").tensors
                   for d in t.free_strides}  # fmt: skip
        return admits({**names, **strides}, {})

    assert admitted(64)
    assert not admitted(100_000)
