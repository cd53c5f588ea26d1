"""Wrap a user's functions, so that an error names the function and the call, not a traceback.

The functions of an operator's module are the user's code and may raise or return anything. Each
function is therefore wrapped when the module is loaded. An exception becomes a `VerifyError` with
the place in the function, the exception and the call; so does a `cost` that is no `Cost`, and
another function's result that is no dict.
"""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from kgen.errors import CatalogueError, KgenError, VerifyError, suggest
from kgen.operators.base import Cost, Operator

_WRAPPED = ("definition", "make_inputs", "cost", "scale", "untouched", "trained")
# The positional arguments of each function.
_ARGUMENTS = {
    "definition": "pass_name, inputs, scalars",
    "make_inputs": "pass_name, problem, case, generator, device",
    "cost": "pass_name, problem",
    "peers": "pass_name",
    "scale": "pass_name, inputs, outputs, scalars",
    "untouched": "pass_name, inputs",
    "trained": "pass_name, problem, inputs, generator",
}
_OPTIONAL = ("scale", "untouched", "trained")


@contextmanager
def without_exit() -> Iterator[None]:
    """Let `os._exit` raise SystemExit, as `sys.exit` does.

    Otherwise a user's code could end the process of a tune with a status that means success.
    """
    real = os._exit

    def leave(status: int) -> NoReturn:
        raise SystemExit(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = real


def check_declaration(operator: Operator, file: Path) -> None:
    """Check an operator's functions, texts and names of dims.

    Without this check a later step would fail without naming the field.

    Raises:
        CatalogueError: If a function cannot be called with its arguments, a text is no text, or a
            name is not a dim of the signature.
    """
    for name, arguments in _ARGUMENTS.items():
        function = getattr(operator, name)
        if function is None and name in _OPTIONAL:
            continue
        if not callable(function) or not _takes(function, arguments.count(",") + 1):
            raise CatalogueError(
                f"{file}: OPERATOR.{name} is {_declared(function)}\n"
                f"  allowed: a function ({arguments})"
            )
    texts = {"cases": operator.cases, "aliases": operator.aliases,
             **{f"problems['{key}']": value for key, value in operator.problems.items()}}
    for name, value in texts.items():
        if isinstance(value, str) or not all(isinstance(text, str) for text in value):
            raise CatalogueError(
                f"{file}: OPERATOR.{name} is {value!r}\n  allowed: a tuple of texts, as (\"a\",)"
            )
    known = [dim.name for dim in operator.signature.dims]
    for name in ("repeats", "serial_dims", "head_dims", "slab_dim"):
        value = getattr(operator, name)
        for dim in (value,) if isinstance(value, str) else value or ():
            if dim not in known:
                raise CatalogueError(
                    f"{file}: OPERATOR.{name} names '{dim}', which is no dim\n"
                    f"  {suggest(str(dim), known)}"
                )


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with `count` positional arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C
        return True
    try:
        signature.bind(*(None,) * count)
    except TypeError:
        return False
    return True


def _declared(function: object) -> str:
    if not callable(function):
        return repr(function)
    return f"{getattr(function, '__name__', 'a function')}{inspect.signature(function)}"


def with_clear_errors(operator: Operator) -> Operator:
    """Wrap the functions that an operator declares.

    Peers are not wrapped: an exception of a peer is a result, which the report contains.
    """
    wrapped: dict[str, Any] = {
        name: _wrapped(operator.name, name, function)
        for name in _WRAPPED
        if (function := getattr(operator, name)) is not None
    }
    return replace(operator, **wrapped)


def _wrapped(operator: str, field: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            with without_exit():
                found = function(*arguments, **named)
        except (KgenError, MemoryError):
            raise
        except Exception as problem:
            if _is_of_memory(problem):  # too large a problem, not a fault of the function
                raise
            raise VerifyError(
                f"{operator}: {field} raises {type(problem).__name__}: {problem}\n"
                f"  at {_place(problem, function)}, called for {_call_text(arguments)}\n"
                f"  next: mend the function; it must take every problem that the signature allows"
            ) from problem
        if field == "cost":
            _check_cost(operator, found, arguments)
        elif not isinstance(found, dict):
            raise VerifyError(
                f"{operator}: {field} returns {_kind(found)}, for {_call_text(arguments)}\n"
                "  allowed: a dict of tensors by name"
            )
        return found

    return call


def _check_cost(operator: str, found: object, arguments: tuple[Any, ...]) -> None:
    if not isinstance(found, Cost):
        raise VerifyError(
            f"{operator}: cost returns {_kind(found)}, for {_call_text(arguments)}\n"
            "  allowed: Cost(bytes=..., flops=...) of kgen.operators.base"
        )
    for name, value in (("bytes", found.bytes), ("flops", found.flops)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise VerifyError(
                f"{operator}: cost returns {name}={value!r}, for {_call_text(arguments)}\n"
                "  allowed: a number from 0 on"
            )


def _is_of_memory(problem: Exception) -> bool:
    return type(problem).__name__ == "OutOfMemoryError" or "allocate memory" in str(problem)


def _place(problem: Exception, function: Callable[..., Any]) -> str:
    """The line of the function's file where the error came from."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function)) or ""
    except TypeError:  # a callable object
        file = ""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames[1:] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


def _call_text(arguments: tuple[Any, ...]) -> str:
    """The pass and the problem of a call, or the shapes of its tensors."""
    said = []
    for argument in arguments:
        if isinstance(argument, str):
            said.append(argument)
        elif type(argument).__name__ == "Problem":
            said.append(str(argument))
        elif isinstance(argument, dict):
            said += [
                f"{name} {tuple(value.shape)}"
                for name, value in argument.items()
                if hasattr(value, "shape")
            ]
    return ", ".join(said)


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
