"""This library as a back-end of flash-linear-attention (FLA): FLA's functions run on its kernels.

    from kgen_ops.compat import fla_backend
    print(fla_backend.register())

FLA sends the calls of some of its functions to the first registered back-end that accepts them
(`fla.backends`, since FLA 0.6.0). This back-end accepts the calls that the library serves. For all
other calls FLA goes on to its other back-ends and its own kernels, and logs the reason once
(`logging.getLogger("fla.backends")`, level INFO). Models and layers of FLA need no change.

Functions that FLA does not dispatch are not served this way: `kgen_ops.patch(model)` replaces them
in layers, and `kgen_ops.compat` has versions to import. `FLA_KGEN=0` in the environment switches
the back-end off; `FLA_DISABLE_BACKEND_DISPATCH=1` switches all of FLA's dispatch off.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _fla_calls
from ._fla_calls import Call, DeclinedError
from ._library import has_operator, library_name, operator_of, why_not

__all__ = ["Registered", "register", "unregister"]

_NEEDED = "0.6.0"  # the first FLA with fla.backends
_BACKEND = "kgen"
# Tried before FLA's TileLang and Gluon back-ends, whose priority is 5, and after the Ascend
# back-end, whose priority is 0.
_PRIORITY = 1


class _Function(NamedTuple):
    """A function that FLA dispatches.

    Attributes:
        name: Name of FLA's function, and of the function in `_fla_calls` that converts its
            arguments.
        module: The FLA module that defines the function.
        operator: The operator that serves the function.
        operation: FLA's name of a registry that several functions share; empty: the function has a
            registry of its own.
    """

    name: str
    module: str
    operator: str
    operation: str = ""


_NORM = "fla.modules.norm.layernorm"
_FUNCTIONS = (
    _Function("chunk_dplr_delta_rule", "fla.ops.generalized_delta_rule.dplr.chunk", "wkv7",
              "generalized_delta_rule.dplr"),
    _Function("fused_recurrent_simple_gla", "fla.ops.simple_gla.fused_recurrent",
              "linear_attention"),
    _Function("fused_chunk_simple_gla", "fla.ops.simple_gla.fused_chunk", "linear_attention"),
    _Function("layer_norm_fwd", _NORM, "rmsnorm"),
    _Function("layer_norm_bwd", _NORM, "rmsnorm"),
)
# Functions that the library serves, but that FLA 0.6.0 does not dispatch as a whole.
_NOT_DISPATCHED = (
    "chunk_linear_attn", "chunk_rwkv6", "fused_recurrent_rwkv6", "fused_recurrent_rwkv7",
    "fused_mul_recurrent_rwkv7",
)


class Registered(NamedTuple):
    """The FLA functions that `register` added and those it could not add, with reasons; printable.

    Attributes:
        served: FLA's function -> the operator that serves its calls.
        left: FLA's function -> why the library does not serve it.
    """

    served: dict[str, str]
    left: dict[str, str]

    def __repr__(self) -> str:
        lines = [f"{len(self.served)} functions of FLA call the library where it serves the call"]
        lines += [f"  {name}: by {operator}" for name, operator in self.served.items()]
        lines += [f"  left alone: {name}: {why}" for name, why in self.left.items()]
        return "\n".join([
            *lines, f"  not dispatched by FLA: {', '.join(_NOT_DISPATCHED)}",
            f"    layers that call them: {library_name()}.patch(model)",
        ])


class _Switch:
    """Whether FLA may use the back-end: FLA cannot remove a back-end from its registries."""

    on = False


def register() -> Registered:
    """Let the functions that FLA dispatches run on this library's kernels, in this process.

    Models that already exist need no change, even if they have called such a function before: their
    next call asks this back-end. Registering again changes nothing.

    Returns:
        The functions that the library serves, and those that it does not serve.
    Raises:
        ImportError: If FLA is missing, cannot be imported, or is older than 0.6.0.
        RuntimeError: If FLA_DISABLE_BACKEND_DISPATCH=1 switches FLA's dispatch off.
        NotImplementedError: If the library has none of the operators.
    """
    backends = _fla_backends()
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise RuntimeError(
            "fla_backend: FLA_DISABLE_BACKEND_DISPATCH=1 is set, so FLA asks no back-end\n"
            "  unset it before fla is imported"
        )
    served: dict[str, str] = {}
    left: dict[str, str] = {}
    for function in _FUNCTIONS:
        if why := _left_alone(backends, function):
            left[function.name] = why
        else:
            served[function.name] = function.operator
    if not served:
        raise NotImplementedError(
            "fla_backend: the library serves no function of FLA:\n"
            + "".join(f"  {name}: {why}\n" for name, why in left.items())
            + "  run: kgen tune --op wkv7 --gpu auto"
        )
    _Switch.on = True
    return Registered(served, left)


def unregister() -> None:
    """Let FLA use its own kernels again, as before `register`; without FLA nothing happens.

    The back-end stays in FLA's registries, switched off.
    """
    _Switch.on = False


def _fla_backends() -> Any:
    """The module `fla.backends`.

    Raises:
        ImportError: If FLA or the module cannot be imported.
    """
    install = f"pip install 'flash-linear-attention>={_NEEDED}'"
    try:
        fla = importlib.import_module("fla")
    except ImportError as why:
        if why.name == "fla":
            raise ImportError(
                "fla_backend: flash-linear-attention is not installed\n"
                f"  run: {install}", name="fla") from None
        raise ImportError(
            f"fla_backend: flash-linear-attention cannot be imported: {why}\n"
            "  install what it names, and try: python -c 'import fla'", name=why.name) from why
    try:
        return importlib.import_module("fla.backends")
    except ImportError as why:
        if why.name != "fla.backends":
            raise
        raise ImportError(
            f"fla_backend: flash-linear-attention {getattr(fla, '__version__', '(no version)')} "
            f"has no fla.backends\n  needed: {_NEEDED} or newer; run: {install}\n"
            f"  without: {library_name()}.patch(model) swaps what layers of FLA call",
            name="fla.backends") from None


def _left_alone(backends: Any, function: _Function) -> str:
    """Register the library for a function of FLA; return why not, or an empty text."""
    if not has_operator(function.operator):
        return f"the library has no {function.operator}"
    try:
        published = getattr(importlib.import_module(function.module), function.name)
    except (ImportError, AttributeError):
        return f"this FLA has no {function.module}.{function.name}"
    made = _methods(function)
    if function.operation:
        # A registry for several functions takes a class with a method for each function.
        backends.register(function.operation)(_kind(backends.BaseBackend, made))
        return ""
    try:
        backends.register(
            published, backend=_kind(backends.BaseBackend, {}),
            verifier=made[f"{function.name}_verifier"],
        )(made[function.name])
    except KeyError:
        return "this FLA does not dispatch it"
    return ""


def _kind(base: type, methods: dict[str, Callable[..., Any]]) -> type:
    """A subclass of FLA's back-end class, which FLA instantiates."""

    def is_enabled(self: Any) -> bool:
        return _Switch.on and bool(base.is_enabled(self))  # type: ignore[attr-defined]

    named = {"backend_type": _BACKEND, "priority": _PRIORITY, "env_var": "FLA_KGEN",
             "is_enabled": is_enabled, "__doc__": "Kernels of kgen."}
    return type("KgenBackend", (base,), named | {k: staticmethod(v) for k, v in methods.items()})


def _methods(function: _Function) -> dict[str, Callable[..., Any]]:
    """The methods that FLA calls, by name: the verifier of a call, and the call itself."""
    asked: Callable[..., Call] = getattr(_fla_calls, function.name)

    def verifier(*arguments: Any, **keywords: Any) -> tuple[bool, str | None]:
        try:
            call = asked(*arguments, **keywords)
        except (DeclinedError, TypeError) as why:
            return False, str(why)
        pass_name = "backward" if call.backward else "forward"
        reason = why_not(call.operator, pass_name, call.tensors, call.scalars, call.flags)
        return not reason, reason or None

    def served(*arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        call = asked(*arguments, **keywords)
        operator = operator_of(f"{call.operator}_backward" if call.backward else call.operator)
        return call.results(operator(*call.tensors, *call.scalars, *call.flags))

    return {function.name: served, f"{function.name}_verifier": verifier}
