"""Calls of an operator's peers, ready to be timed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from kgen.check.errors import output_accuracy
from kgen.check.fixture import Fixture
from kgen.model.record import OutputAccuracy
from kgen.operators.base import Operator
from kgen.worker.messages import CallCosts, Finals

Tensors = Mapping[str, torch.Tensor]
Call = Callable[[], None]
Bare = Callable[[], object]


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
        The calls of those that work, by name, and why the others do not. Each peer has in-out
        tensors of its own.
    """
    bare, errors = _working(operator, finals, sets, synchronize, slow)
    return {name: [_peer_call(call) for call in calls] for name, calls in bare.items()}, errors


def bare_peer_calls(
    operator: Operator,
    request: CallCosts,
    tensors: Tensors,
    synchronize: Callable[[], None],
) -> tuple[dict[str, Bare], dict[str, str]]:
    """Make one call of each wanted peer, with nothing around it but what passes its arguments.

    Returns:
        The calls of those that work, by name, and why the others do not.
    """
    bare, errors = _working(operator, request, [tensors], synchronize, slow=False)
    return {name: call for name, (call,) in bare.items()}, errors


def peer_accuracy(
    operator: Operator, finals: Finals, fixture: Fixture, synchronize: Callable[[], None]
) -> dict[str, tuple[OutputAccuracy, ...]]:
    """Compare what the wanted peers return with the oracle's outputs, on the problem's own inputs.

    The peers are made for this alone, and dropped: what they keep of the inputs, for a backward
    pass, would be memory that those who are timed want.

    Returns:
        By name, of those that work and leave room for it, each output that was returned in its
        place.
    """
    if finals.peers == ():  # not even the oracle's outputs are made
        return {}
    made = fixture.input_set(fixture.schedule.whole())
    peers, _ = _working(operator, finals, [made.values], synchronize, slow=False)
    accuracy = {}
    wanted = {name: buffer.tensor for name, buffer in made.results.items()}
    for name, (call,) in peers.items():
        with suppress(torch.OutOfMemoryError), torch.no_grad():
            for updated, value in made.initial.items():  # what made the peer work updated it
                call.args[0][updated].copy_(value)
            accuracy[name] = output_accuracy(fixture, made, _by_name(call(), wanted))
    return accuracy


def _by_name(returned: object, wanted: Tensors) -> dict[str, torch.Tensor]:
    """Outputs in the operator's order, as far as they are what is wanted; a peer may return fewer
    of them, or something else behind them."""
    given = returned if isinstance(returned, tuple | list) else (returned,)
    found: dict[str, torch.Tensor] = {}
    for (name, like), tensor in zip(wanted.items(), given, strict=False):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.shape != like.shape:
            break
        found[name] = tensor
    return found


def _working(
    operator: Operator,
    request: Finals | CallCosts,
    sets: Sequence[Tensors],
    synchronize: Callable[[], None],
    slow: bool,
) -> tuple[dict[str, list[partial[object]]], dict[str, str]]:
    errors: dict[str, str] = {}
    working: dict[str, list[partial[object]]] = {}
    if request.peers == ():  # not even made: torch.compile takes a while to load
        return working, errors
    scalars = operator.arguments(request.pass_name, request.problem)
    updated = [t.name for t in operator.signature.pass_named(request.pass_name).in_outs]
    # On a machine without a GPU, compiling a peer warns that it found no CUDA runtime.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for name, peer in operator.peers(request.pass_name).items():
        left_out = () if slow else operator.slow_peers
        if name in left_out if request.peers is None else name not in request.peers:
            continue
        try:
            # In-out tensors of its own for each set: for a large pool of states there may be no
            # memory left, and then this peer alone is left out.
            own = [{**tensors, **{n: tensors[n].clone() for n in updated}} for tensors in sets]
            calls: list[partial[object]] = [partial(peer, tensors, scalars) for tensors in own]
            with torch.no_grad():
                for _ in range(3):  # a compiled peer compiles here, not while it is timed
                    calls[0]()
            synchronize()
        except (Exception, SystemExit) as problem:  # it may fail in any way; that is reported
            errors[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
            own, calls = [], []  # what it took is free for the next one
            continue
        working[name] = calls
    return working, errors


def _peer_call(bare: Bare) -> Call:
    def call() -> None:
        with torch.no_grad():
            bare()

    return call
