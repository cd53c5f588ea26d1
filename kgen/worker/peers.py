"""Calls of an operator's peers, ready to be timed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from kgen.operators.base import Operator
from kgen.worker.messages import Finals

Tensors = Mapping[str, torch.Tensor]
Call = Callable[[], None]


def peer_calls(
    operator: Operator,
    finals: Finals,
    sets: Sequence[Tensors],
    synchronize: Callable[[], None],
    *,
    slow: bool = False,
) -> tuple[dict[str, Sequence[Call]], dict[str, str]]:
    """Make one call per buffer set of each wanted peer.

    Args:
        operator: Has the peers.
        finals: Says which are wanted.
        sets: Inputs by name.
        synchronize: Waits for the device.
        slow: Whether all peers means the slow ones, too.
    Returns:
        The calls of those that work, by name, and why the others do not.
    """
    errors: dict[str, str] = {}
    working: dict[str, Sequence[Call]] = {}
    if finals.peers == ():  # not even made: torch.compile takes a while to load
        return working, errors
    scalars = operator.arguments(finals.pass_name, finals.problem)
    # On a machine without a GPU, compiling a peer warns that it found no CUDA runtime.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for name, peer in operator.peers(finals.pass_name).items():
        left_out = () if slow else operator.slow_peers
        if name in left_out if finals.peers is None else name not in finals.peers:
            continue
        calls = [_peer_call(peer, tensors, scalars) for tensors in sets]
        try:
            for _ in range(3):  # a compiled peer compiles here, not while it is timed
                calls[0]()
            synchronize()
        except Exception as problem:  # a peer may fail in any way; it is reported, not hidden
            errors[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
            continue
        working[name] = calls
    return working, errors


def _peer_call(
    peer: Callable[[Mapping[str, torch.Tensor], Mapping[str, float]], object],
    tensors: Tensors,
    scalars: Mapping[str, float],
) -> Call:
    def call() -> None:
        with torch.no_grad():
            peer(tensors, scalars)

    return call
