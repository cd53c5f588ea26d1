"""Calls of an emitted library's public function, to be timed beside its kernels."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from kgen.errors import LaunchError
from kgen.operators.base import Operator
from kgen.worker.kept_outputs import keeping_outputs

PACKAGE = "kgen_ops"


def library_calls(
    folder: Path,
    operator: Operator,
    pass_name: str,
    sets: Sequence[Mapping[str, torch.Tensor]],
    options: Mapping[str, str] | None = None,
) -> list[Callable[[], None]]:
    """Return one call of `kgen_ops.<operator>` per buffer set.

    The function allocates its outputs; see `keeping_outputs`.

    Args:
        folder: The folder that contains the package `kgen_ops`.
        operator: The operator.
        pass_name: `forward` or `backward`.
        sets: Tensors by name, without those that the problem leaves out. Inputs are passed to the
            function; optional outputs in a set are requested from it.
        options: The problem's choice for each option; None: the defaults.
    Raises:
        LaunchError: If the library cannot be imported from the folder, or lacks the function.
    """
    function = _function(folder, operator.name, pass_name)
    return [
        keeping_outputs(_bound(function, operator, pass_name, tensors, options))
        for tensors in sets
    ]


def library_call(
    folder: Path,
    operator: Operator,
    pass_name: str,
    tensors: Mapping[str, torch.Tensor],
    options: Mapping[str, str] | None = None,
) -> Callable[[], object]:
    """Return the bare call of `kgen_ops.<operator>` for one buffer set; see `library_calls`.

    Raises:
        LaunchError: If the library cannot be imported from there, or lacks the function.
    """
    return _bound(
        _function(folder, operator.name, pass_name), operator, pass_name, tensors, options
    )


def _bound(
    function: Callable[..., object],
    operator: Operator,
    pass_name: str,
    tensors: Mapping[str, torch.Tensor],
    options: Mapping[str, str] | None,
) -> Callable[[], object]:
    declared = operator.signature.pass_named(pass_name)
    asked_for = operator.signature.asked_for(declared)
    inputs = {i.name: tensors[i.name] for i in declared.inputs if i.name in tensors}
    wanted = {f"return_{o.name}": True for o in asked_for if o.name in tensors}
    # Bound by name, because an input that the problem leaves out may stand between two others.
    scalars = operator.scalars(pass_name)
    bound = inspect.signature(function).bind(**inputs, **scalars, **wanted, **(options or {}))
    bound.apply_defaults()
    # Called by position, as models do: keyword arguments of a partial cost 0.2 us per call.
    return partial(function, *bound.args, **bound.kwargs)


def _function(folder: Path, operator: str, pass_name: str) -> Callable[..., object]:
    root = folder.resolve()
    sys.path.insert(0, str(root))
    try:
        library = importlib.import_module(PACKAGE)
    except ImportError as problem:
        raise LaunchError(
            f"{root}: no {PACKAGE} can be imported from there: {problem}\n"
            "  run 'kgen tune' first, or say with --out where the library is"
        ) from None
    finally:
        sys.path.remove(str(root))
    found = Path(str(library.__file__)).resolve()
    if not found.is_relative_to(root):
        raise LaunchError(
            f"{PACKAGE} came from {found.parent}, not from {root}\n"
            "  a worker can import one library: start another"
        )
    name = operator if pass_name == "forward" else f"{operator}_{pass_name}"
    function: Callable[..., object] | None = getattr(library, name, None)
    if function is None:
        raise LaunchError(f"{found.parent} has no function '{name}'; it was not emitted")
    return function
