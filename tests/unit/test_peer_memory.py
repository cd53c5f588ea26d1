"""Memory of peers: their outputs rotate, and a peer whose in-out tensors do not fit is left out."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from kgen.catalogue import open_catalogue
from kgen.model.problem import parse_problem
from kgen.worker import Finals
from kgen.worker.peers import peer_calls

DECODE = "B=2,S=4,T=1,H=1,K=8,V=8,dtype=bf16,state_indices_dtype=int32"


def test_no_memory_for_a_copy_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    operator = replace(
        open_catalogue().entry("wkv7_decode").operator,
        peers=lambda _: {name: lambda *_, name=name: called.append(name)
                         for name in ("first", "second")})
    problem = parse_problem(DECODE, operator.signature)
    tensors = operator.make_inputs(
        "forward", problem, "normal", torch.Generator().manual_seed(0), torch.device("cpu"))
    clone, left = torch.Tensor.clone, 3

    def limited(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError("out of memory, on purpose")
        return clone(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "clone", limited)
    calls, errors = peer_calls(
        operator, Finals("forward", problem, (), None), [tensors, tensors], lambda: None)
    assert list(calls) == ["first"]
    assert len(calls["first"]) == 2
    assert errors == {"second": "OutOfMemoryError: out of memory, on purpose"}
    assert set(called) == {"first"}


def test_outputs_rotate_with_the_buffer_sets() -> None:
    """A peer that gets the same output memory in every call writes to L2, not to memory."""
    made: list[weakref.ref[torch.Tensor]] = []

    def peer(*_: object) -> torch.Tensor:
        output = torch.empty(4)
        made.append(weakref.ref(output))
        return output

    entry = open_catalogue().entry("rmsnorm")
    operator = replace(entry.operator, peers=lambda _: {"peer": peer})
    problem = parse_problem("M=2,N=8,dtype=bf16", operator.signature)
    calls, _ = peer_calls(
        operator, Finals("forward", problem, (), None), [{}, {}, {}], lambda: None)
    made.clear()
    for call in calls["peer"]:
        call()
    assert all(output() is not None for output in made)
    calls["peer"][0]()
    assert [output() is None for output in made] == [True, False, False, False]
