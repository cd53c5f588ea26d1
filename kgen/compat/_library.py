"""Find the operators of the library that contains this package."""

from __future__ import annotations

import functools
import importlib
import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

_LIBRARY = importlib.import_module(__name__.rpartition(".compat.")[0])

_P = ParamSpec("_P")
_R = TypeVar("_R")


def names_mistakes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make an adapter's errors name the argument at fault.

    An adapter reshapes tensors before the library sees them, so the library's own error may not
    name the argument. Only a call that fails is checked, so that a correct call costs nothing more.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError,
                ValueError) as problem:
            if isinstance(problem, NotImplementedError) and "kgen" in str(problem):
                raise  # this error is clear enough
            _name_mistake(function, args, kwargs, problem)
            raise

    return call


def _name_mistake(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object],
    problem: Exception,
) -> None:
    """Raise a clearer error if an argument is no tensor, or shapes do not fit.

    Raises:
        TypeError: If an argument is not the tensor, number or truth value that it must be, or is a
            tensor of a kind that no kernel reads.
        ValueError: If a tensor has too few dims, cannot be viewed as heads, is on another device
            than the other tensors, or its memory was freed.
    """
    name = function.__qualname__
    if str(problem).startswith(f"{name}:"):  # the adapter's own error
        return
    try:
        signature = inspect.signature(function)
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # too few or unknown arguments: the first error says so
        return
    for argument, value in given.items():
        kind = str(signature.parameters[argument].annotation)
        is_left_out = value is None and kind == "Tensor | None"
        if kind in ("Tensor", "Tensor | None") and not (isinstance(value, Tensor) or is_left_out):
            raise TypeError(
                f"{name}: {argument} must be a tensor, not {type(value).__name__}\n"
                f"  next: compare the arguments with help({name})"
            ) from problem
        if wrong := _wrong_kind(kind, value):
            raise TypeError(
                f"{name}: {argument} must be {wrong}, not {type(value).__name__} "
                f"{reprlib.repr(value)}\n  next: compare the arguments with help({name})"
            ) from problem
    _check_tensors(name, given, problem)
    if isinstance(problem, ArithmeticError | IndexError) or str(problem).startswith("shape '"):
        shapes = ", ".join(f"{argument} {list(value.shape)}" for argument, value in given.items()
                           if isinstance(value, Tensor))
        raise ValueError(
            f"{name}: the shapes do not fit: {shapes}\n  next: compare them with help({name})"
        ) from problem
    if type(problem) is RuntimeError and _is_of_adapter(problem):
        kinds = ", ".join(f"{argument} {list(value.shape)} {value.dtype}"
                          for argument, value in given.items() if isinstance(value, Tensor))
        why = str(problem).partition("\n")[0]
        raise ValueError(
            f"{name}: the arguments do not fit each other: {why}\n  given: {kinds}\n"
            f"  next: compare them with help({name})"
        ) from problem


def _is_of_adapter(problem: BaseException) -> bool:
    """Whether a PyTorch operation in an adapter raised the error, not one in the library."""
    frame = problem.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__"))
    return module.startswith(f"{_LIBRARY.__name__}.compat.")


def _wrong_kind(kind: str, value: object) -> str:
    """What an argument must be; empty if its value is of the kind that its annotation says."""
    if value is None and kind.endswith("| None"):
        return ""
    if kind == "bool":
        return "" if isinstance(value, bool | int) else "True or False"
    if kind == "int":
        return "" if isinstance(value, int) else "a whole number"
    if kind == "float | None":
        return "" if isinstance(value, Tensor) or hasattr(value, "__float__") else "a number"
    if kind != "Tensor" and kind.startswith(("KeyValueState", "list[Tensor]")):
        parts = value if isinstance(value, list | tuple) else [value]
        return "" if all(isinstance(part, Tensor) for part in parts) else "a tensor, or several"
    return ""


def _check_tensors(name: str, given: Mapping[str, object], problem: Exception) -> None:
    """Raise an error for a tensor that no kernel reads.

    Raises:
        TypeError: If a tensor is sparse, nested or quantised.
        ValueError: If a tensor was freed, or is on another device than the first tensor.
    """
    kinds = importlib.import_module(f"{_LIBRARY.__name__}._runtime.argument_kinds")
    first: tuple[str, Tensor] | None = None
    for argument, value in given.items():
        if not isinstance(value, Tensor):
            continue
        try:
            kinds.check_strided(name, argument, value)
            kinds.check_storage(name, argument, value)
        except (TypeError, ValueError) as found:
            raise found from problem
        first = first or (argument, value)
        if value.device != first[1].device:
            raise ValueError(
                f"{name}: {argument} is on {value.device}, but {first[0]} is on "
                f"{first[1].device}\n  next: move one of them; all tensors of a call must share a "
                "device"
            ) from problem


def operator_of(name: str) -> Callable[..., Any]:
    """Look up `kgen_ops.<name>`.

    A missing operator raises when it is called, not when it is imported, so that a library with a
    single operator supports the adapters of that operator.
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
