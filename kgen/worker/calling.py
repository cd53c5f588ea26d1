"""The host time of a call of the library's function and of the peers."""

from __future__ import annotations

import compileall
import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kgen.errors import LaunchError
from kgen.measure.call_cost import call_costs, collected
from kgen.operators.base import Operator
from kgen.worker.facts import extension_folder
from kgen.worker.library import PACKAGE, library_call
from kgen.worker.messages import CallCosts, CallCostsOutcome
from kgen.worker.peers import bare_peer_calls

Tensors = Mapping[str, torch.Tensor]

# Largest error relative to the norm of an output. Kernels are verified when they are tuned; this
# only detects that the function computes something other than the operator.
_GROSS = 0.05


def cost_of_calls(
    operator: Operator,
    request: CallCosts,
    tensors: Tensors,
    device: torch.device,
    synchronize: Callable[[], None],
) -> CallCostsOutcome:
    """Time the library's function and the operator's peers on one set of inputs.

    Args:
        operator: The operator, with its peers and definition.
        request: The request of the parent.
        tensors: Inputs and outputs of the problem, by name.
        device: The device that holds them.
        synchronize: Waits for the device.
    Raises:
        LaunchError: If the library cannot be used, or does not compute the operator.
    """
    options = operator.options(request.problem)
    # As an installation by pip does; else the first call would also compile the dispatch table.
    compileall.compile_dir(Path(request.library, PACKAGE), quiet=2)
    library = library_call(
        Path(request.library), operator, request.pass_name, tensors, options
    )
    launcher = _launcher() if device.type == "cuda" else "host"
    declared = operator.signature.pass_named(request.pass_name)
    before = {t.name: tensors[t.name].clone() for t in declared.in_outs}
    synchronize()
    with torch.no_grad(), collected():
        started = time.perf_counter_ns()
        made = library()
        first_ms = (time.perf_counter_ns() - started) / 1e6
    _check(operator, request, {**tensors, **before}, made)
    peers, errors = bare_peer_calls(operator, request, tensors, synchronize)
    costs = call_costs({PACKAGE: library, **peers}, device, synchronize)
    return CallCostsOutcome(costs, launcher, first_ms, errors)


def _launcher() -> str:
    """Build the library's C extensions, as an installation by pip does; return the one in use."""
    runtime = importlib.import_module(f"{PACKAGE}._runtime.extension")
    # In a folder of its own: kgen's launcher has the same source and is already loaded here.
    folder = extension_folder() / PACKAGE
    folder.mkdir(exist_ok=True)
    return "compiled" if runtime.provide_extensions(folder) else "Python"


def _check(operator: Operator, request: CallCosts, tensors: Tensors, made: object) -> None:
    declared = operator.signature.pass_named(request.pass_name)
    inputs = {i.name: tensors[i.name] for i in declared.inputs if i.name in tensors}
    wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    with torch.no_grad():
        wanted = operator.definition(
            request.pass_name, wide, operator.arguments(request.pass_name, request.problem)
        )
    outputs = (made,) if isinstance(made, torch.Tensor) else made
    assert isinstance(outputs, tuple)
    names = [o.name for o in declared.outputs if o.name in tensors]
    for name, got in zip(names, outputs, strict=True):
        norm = wanted[name].norm().item()
        error = (got.double() - wanted[name]).norm().item()
        if not error <= _GROSS * norm + torch.finfo(torch.float32).tiny:
            raise LaunchError(
                f"{PACKAGE}.{operator.name}, {request.pass_name} {request.problem}: {name} is off "
                f"by {error:.2e}, its norm is {norm:.2e}; {_GROSS:.0%} is allowed here\n"
                f"  run: kgen verify --op {operator.name} --pass {request.pass_name} --problem "
                f"{request.problem}"
            )

