"""fast-transformers as a peer: what it is called with, and what it refuses."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch

from kgen.operators import _linear_attention_peers as module


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> module.Peer:
    """The peer, with a package of the same function in its place."""

    def causal_dot_product(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert q.is_contiguous()
        assert q.dtype == torch.float32
        return (q @ k.transpose(-1, -2)).tril() @ v

    package, inner = ModuleType("fast_transformers"), ModuleType("fast_transformers.causal_product")
    package.__spec__ = SimpleNamespace(name="fast_transformers")  # type: ignore[assignment]
    inner.causal_dot_product = causal_dot_product  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fast_transformers", package)
    monkeypatch.setitem(sys.modules, "fast_transformers.causal_product", inner)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return module.peers("forward")["fast_transformers"]


def inputs(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(2, 3, 50, 8, generator=generator) for name in "qkv"}
    return {**rows, **more}


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_same_as_chunks_in_pytorch(peer: module.Peer, scale: float) -> None:
    given = inputs()
    out, wanted = (
        cast("tuple[torch.Tensor, ...]", function(given, {"scale": scale}))[0]
        for function in (peer, module.peers("forward")["eager"])
    )
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_what_it_does_not_know(peer: module.Peer) -> None:
    state = torch.zeros(2, 3, 8, 8)
    for given, scalars in (
        (inputs(initial_state=state), {"scale": 1.0}),
        (inputs(), {"scale": 1.0, "return_norm": 1.0}),
        ({name: x.bfloat16() for name, x in inputs().items()}, {"scale": 1.0}),
    ):
        with pytest.raises(NotImplementedError, match="fp32 alone, no states and no norms"):
            peer(given, scalars)


def test_a_graph_would_not_have_its_kernel(
    peer: module.Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timed by replays of a graph it took a sixtieth of its time on an H200."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="would not be in the graph"):
        peer(inputs(), {"scale": 1.0})
