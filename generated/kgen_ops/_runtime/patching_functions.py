"""Modules whose methods call a published function that the library serves; part of `patch`.

A method finds a function by its name among the globals of its module. The swapped module gets a
method of the same code with other globals: a copy in which the name means the library's adapter of
`compat`. No published code is copied, and other modules are not affected. Later assignments to the
globals of the published module have no effect on the swapped method.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .patching_trials import TRIALS, Trial, tried

if TYPE_CHECKING:
    from .patching import Found

_SERVED = (torch.float32, torch.float16, torch.bfloat16)
# Arguments that may be fp32 while the other tensors have half precision.
_WIDE = frozenset({"w", "u", "time_decay", "time_first", "initial_state", "state"})


class _Known(NamedTuple):
    """A published function.

    Attributes:
        operator: The operator that serves it.
        adapter: Name of the adapter in `compat`.
        origin: Package that is known to publish the function. A function from there is accepted
            without a trial if it cannot run here; empty: a trial is always required.
        only: Argument -> the only value that the adapter serves.
    """

    operator: str
    adapter: str
    origin: str = ""
    only: Mapping[str, object] = {}


_FLA = "fla.ops."
_KNOWN: dict[str, _Known] = {
    "chunk_linear_attn": _Known(
        "linear_attention", "chunk_linear_attn", _FLA, {"cu_seqlens": None}),
    "fused_chunk_linear_attn": _Known(
        "linear_attention", "chunk_linear_attn", _FLA, {"cu_seqlens": None}),
    "fused_recurrent_linear_attn": _Known(
        "linear_attention", "fused_recurrent_linear_attn", _FLA,
        {"cu_seqlens": None, "reverse": False}),
    "chunk_rwkv6": _Known("wkv6", "chunk_rwkv6", _FLA),
    "fused_recurrent_rwkv6": _Known("wkv6", "fused_recurrent_rwkv6", _FLA, {"reverse": False}),
    "chunk_rwkv7": _Known("wkv7", "chunk_rwkv7", _FLA, {"cp_context": None}),
    "fused_recurrent_rwkv7": _Known("wkv7", "fused_recurrent_rwkv7", _FLA),
    "fused_mul_recurrent_rwkv7": _Known(
        "wkv7", "fused_mul_recurrent_rwkv7", _FLA, {"reverse": False}),
    "rwkv_linear_attention": _Known("wkv4", "rwkv_linear_attention"),
    "rwkv5_linear_attention": _Known("wkv5", "rwkv5_linear_attention"),
    "rwkv6_linear_attention": _Known("wkv6", "rwkv6_linear_attention"),
}


class _Accepted(NamedTuple):
    """A function that may be replaced, its replacement, and why there was no trial."""

    function: Callable[..., Any]
    text: str
    untried: str


class Functions:
    """Finds and replaces published functions; remembers the trials of one `patch`."""

    def __init__(self, library: types.ModuleType, on_cpu: Callable[[str], bool]) -> None:
        """Prepare.

        Args:
            library: The library, with its operators and `compat`.
            on_cpu: (operator) -> whether the library serves CPU tensors.
        """
        self._library = library
        self._on_cpu = on_cpu
        self._found: dict[tuple[Any, torch.device], _Accepted | str] = {}

    def swapped_methods(self, module: nn.Module) -> Found:
        """The methods of a module with functions replaced.

        Returns:
            None if the module calls no known function; a reason to leave it unchanged; or the
            methods by name, a text of what they call, and why there was no trial.
        """
        methods: dict[str, Callable[..., Any]] = {}
        texts: dict[str, None] = {}
        untried: dict[str, None] = {}
        device = next((x.device for x in (*module.parameters(), *module.buffers())),
                      torch.device("cpu"))
        for name, method in _methods(type(module)):
            published = inspect.unwrap(method)
            called = _called(published)
            if not called:
                continue
            if name in module.__dict__:
                return f"its {name} was replaced before"
            if published is not method:
                return f"its {name}, which calls {', '.join(called)}, is wrapped by a decorator"
            other: dict[str, Any] = {}
            for global_name, function in called.items():
                found = self._accepted(global_name, function, device)
                if isinstance(found, str):
                    return found
                other[global_name] = found.function
                texts[found.text] = None
                untried |= {found.untried: None} if found.untried else {}
            methods[name] = _with_globals(method, other)
        return (methods, ", ".join(texts), "; ".join(untried)) if methods else None

    def _accepted(
        self, name: str, function: Callable[..., Any], device: torch.device
    ) -> _Accepted | str:
        key = (function, device)
        if key not in self._found:
            self._found[key] = self._looked_at(name, function, device)
        return self._found[key]

    def _looked_at(
        self, name: str, function: Callable[..., Any], device: torch.device
    ) -> _Accepted | str:
        """The replacement of a function, or the reason why there is none."""
        known = _KNOWN[name]
        if not hasattr(self._library, known.operator):
            return f"it calls {name}, and the library has no {known.operator}"
        compat = importlib.import_module(f"{self._library.__name__}.compat")
        adapter = getattr(compat, known.adapter)
        names = _parameters(function)
        own = _parameters(adapter)
        if unknown := [n for n in names if n not in own]:
            return f"its {name} has arguments that {known.adapter} of compat does not know: " + (
                ", ".join(unknown))
        if names != [n for n in own if n in names]:
            return f"its {name} has the arguments of {known.adapter} of compat in another order"
        trial = TRIALS[name](Trial(device))
        outcome = tried(function, trial, device)
        untried = ""
        if isinstance(outcome, str):
            origin = str(getattr(function, "__module__", ""))
            if not known.origin or not f"{origin}.".startswith(known.origin):
                return f"its {name} failed in a trial: {outcome}"
            if device.type == "cuda":
                return f"its {name} failed in a trial on {device}: {outcome}"
            untried = f"{name} of {origin} was not tried, because it does not run on {device.type}"
        elif not outcome:
            return f"a trial shows that its {name} computes something else"
        replaced = _replacement(function, adapter, known, names, own,
                                self._on_cpu(known.operator))
        return _Accepted(replaced, f"{name} by {known.operator}", untried)


def _replacement(
    function: Callable[..., Any], adapter: Callable[..., Any], known: _Known, names: list[str],
    served: list[str], on_cpu: bool,
) -> Callable[..., Any]:
    """The adapter, and the published function for calls that the adapter does not serve."""

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        if (
            all(name in served for name in given)
            and all(given.get(name, value) is value for name, value in known.only.items())
            and _can_serve(given, on_cpu)
        ):
            return adapter(**given)
        return function(*arguments, **keywords)

    return replaced


def _can_serve(given: Mapping[str, Any], on_cpu: bool) -> bool:
    tensors = [(name, x) for name, x in given.items()
               if isinstance(x, Tensor) and x.is_floating_point()]
    main = [x.dtype for name, x in tensors if name not in _WIDE]
    if not main or main[0] not in _SERVED or any(dtype is not main[0] for dtype in main):
        return False
    return all(
        (x.is_cuda or on_cpu) and x.numel() and x.dtype in (main[0], torch.float32)
        for _, x in tensors
    )


def _methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The methods of a class that are plain functions, as an instance finds them."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for name, value in vars(base).items():
            if name not in seen and isinstance(value, types.FunctionType):
                yield name, value
            seen.add(name)


def _called(method: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The known functions among the globals that a method names."""
    if not isinstance(method, types.FunctionType):
        return {}
    found = {}
    for name in _names(method.__code__):
        function = method.__globals__.get(name)
        if name in _KNOWN and callable(function):
            found[name] = function
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    """The names in a function's code, and in that of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments, without `*arguments` and `**keywords`."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _with_globals(method: types.FunctionType, other: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of the same code, in which some global names mean something else."""
    # Without __name__: with it torch.compile takes these globals for those of the module.
    names = {k: v for k, v in method.__globals__.items() if k != "__name__"} | dict(other)
    made = types.FunctionType(
        method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__ = method.__kwdefaults__
    made.__dict__.update(method.__dict__)
    made.__doc__, made.__qualname__ = method.__doc__, method.__qualname__
    made.__module__ = method.__module__
    return made
