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
from kgen.worker.kept_outputs import keeping_outputs
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
        operator: The operator with its peers.
        finals: Names the wanted peers.
        sets: Inputs by name.
        synchronize: Waits for the device.
        slow: Whether "all peers" includes the slow ones.
    Returns:
        The calls of the peers that work, by name, and why the others do not. Each peer has its own
        in-out tensors, and keeps the outputs of every set.
    """
    bare, errors = _working(operator, finals, sets, synchronize, slow)
    return {name: [keeping_outputs(call) for call in calls] for name, calls in bare.items()}, errors


def bare_peer_calls(
    operator: Operator,
    request: CallCosts,
    tensors: Tensors,
    synchronize: Callable[[], None],
) -> tuple[dict[str, Bare], dict[str, str]]:
    """Make one call of each wanted peer, with no overhead except passing its arguments.

    Returns:
        The calls of the peers that work, by name, and why the others do not.
    """
    bare, errors = _working(operator, request, [tensors], synchronize, slow=False)
    return {name: call for name, (call,) in bare.items()}, errors


def peer_accuracy(
    operator: Operator, finals: Finals, fixture: Fixture, synchronize: Callable[[], None]
) -> dict[str, tuple[OutputAccuracy, ...]]:
    """Compare the outputs of the wanted peers with the oracle, on the problem's own inputs.

    The peers are made only for this, and dropped afterwards: the tensors that they save for a
    backward pass would occupy memory that the timed entrants need.

    Returns:
        By name of a peer, the accuracy of each output that it returned at the expected place.
        Peers that fail or run out of memory are left out.
    """
    if finals.peers == ():  # skip the evaluation of the oracle, too
        return {}
    made = fixture.input_set(fixture.schedule.whole())
    peers, _ = _working(operator, finals, [made.values], synchronize, slow=False)
    accuracy = {}
    wanted = {name: buffer.tensor for name, buffer in made.results.items()}
    for name, (call,) in peers.items():
        with suppress(torch.OutOfMemoryError), torch.no_grad():
            for updated, value in made.initial.items():  # earlier calls of the peer updated it
                call.args[0][updated].copy_(value)
            accuracy[name] = output_accuracy(fixture, made, _by_name(call(), wanted))
    return accuracy


def _by_name(returned: object, wanted: Tensors) -> dict[str, torch.Tensor]:
    """Assign returned values to the operator's outputs in order, while shapes and types match.

    A peer may return fewer outputs, or other values after them.
    """
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
    if request.peers == ():  # do not even call `peers`: torch.compile takes a while to load
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
            # Each set gets its own in-out tensors. If a large pool of states leaves too little
            # memory for them, only this peer is left out.
            own = [{**tensors, **{n: tensors[n].clone() for n in updated}} for tensors in sets]
            calls: list[partial[object]] = [partial(peer, tensors, scalars) for tensors in own]
            with torch.no_grad():
                for _ in range(3):  # a compiled peer compiles here, not while it is timed
                    calls[0]()
            synchronize()
        except (Exception, SystemExit) as problem:  # a peer may fail in any way; report it
            errors[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
            own, calls = [], []  # frees the memory for the next peer
            continue
        working[name] = calls
    return working, errors
