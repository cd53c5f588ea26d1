"""Find the operators of the library that contains this package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_LIBRARY = importlib.import_module(__name__.rpartition(".compat.")[0])


def operator_of(name: str) -> Callable[..., Any]:
    """Look up `kgen_ops.<name>`.

    A missing operator raises when it is called, not when it is imported, so a library with one
    operator supports the adapters of that operator.
    """
    function = getattr(_LIBRARY, name, None)
    return function if callable(function) else _missing(name)


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
