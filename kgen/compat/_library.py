"""The library that this package lies in: its operators, as far as it has them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LIBRARY = importlib.import_module(__name__.rpartition(".compat.")[0])


@dataclass(frozen=True, slots=True)
class Passes:
    """An operator's two public functions.

    Attributes:
        operator: Its name.
        forward: `kgen_ops.<operator>`; one that raises if the library lacks the operator.
        backward: `kgen_ops.<operator>_backward`, likewise.
        takes: Names of the arguments of `forward`.
    """

    operator: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    takes: frozenset[str]


def passes_of(operator: str) -> Passes:
    """Look an operator up. What is missing is an error when it is called, not when it is imported:
    a library that has one operator serves its adapters.
    """
    forward = getattr(_LIBRARY, operator, None)
    if not callable(forward):
        return Passes(operator, _missing(operator), _missing(operator), frozenset())
    backward = getattr(_LIBRARY, f"{operator}_backward", None) or _missing(f"{operator}_backward")
    return Passes(operator, forward, backward, frozenset(inspect.signature(forward).parameters))


def _missing(function: str) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise NotImplementedError(
            f"{_LIBRARY.__name__} has no function '{function}'\n"
            f"  run: kgen tune --op {function.removesuffix('_backward')} --gpu auto"
        )

    return fail


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record a call with these arguments."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def refuse(function: str, argument: str, value: object, allowed: str, instead: str) -> None:
    """Raise the error of an argument that no kernel serves.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        f"{function}: {argument} = {value} is not served\n  allowed: {allowed}; {instead}"
    )
