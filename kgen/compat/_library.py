"""Find the operators of the library that contains this package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

_LIBRARY = importlib.import_module(__name__.rpartition(".compat.")[0])


def operator_of(name: str) -> Callable[..., Any]:
    """Look up `kgen_ops.<name>`.

    A missing operator raises when it is called, not when it is imported, so a library with one
    operator supports the adapters of that operator.
    """
    function = getattr(_LIBRARY, name, None)
    return function if callable(function) else _missing(name)


def has_operator(name: str) -> bool:
    """Whether there is `kgen_ops.<name>`."""
    return callable(getattr(_LIBRARY, name, None))


def library_name() -> str:
    """The name under which the library was imported."""
    return _LIBRARY.__name__


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
        f"{function}: {argument} = {value} is not supported\n  allowed: {allowed}; {instead}"
    )


def why_not(
    operator: str, pass_name: str, tensors: Sequence[Tensor | None], scalars: Sequence[float],
    flags: Sequence[bool | str],
) -> str:
    """Say why the library does not serve a call of an operator that it has; empty if it does."""
    serving = importlib.import_module(f"{_LIBRARY.__name__}._runtime.serving")
    reason: str = serving.why_not(operator, pass_name, tensors, scalars, flags)
    return reason
