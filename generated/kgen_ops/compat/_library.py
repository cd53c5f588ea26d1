"""The library that this package lies in: its operators, as far as it has them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LIBRARY = importlib.import_module(__name__.rpartition(".compat.")[0])


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of the library.

    Attributes:
        function: `kgen_ops.<operator>`; one that raises if the library lacks the operator.
        takes: Names of its arguments.
    """

    function: Callable[..., Any]
    takes: frozenset[str]


def operator_of(name: str) -> Operator:
    """Look an operator up. What is missing is an error when it is called, not when it is imported:
    a library that has one operator serves its adapters.
    """
    function = getattr(_LIBRARY, name, None)
    if not callable(function):
        return Operator(_missing(name), frozenset())
    return Operator(function, frozenset(inspect.signature(function).parameters))


def _missing(name: str) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise NotImplementedError(
            f"{_LIBRARY.__name__} has no function '{name}'\n  run: kgen tune --op {name} --gpu auto"
        )

    return fail


def refuse(function: str, argument: str, value: object, allowed: str, instead: str) -> None:
    """Raise the error of an argument that no kernel serves.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        f"{function}: {argument} = {value} is not served\n  allowed: {allowed}; {instead}"
    )
