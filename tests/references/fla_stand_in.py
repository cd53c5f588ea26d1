"""The part of FLA that `kgen_ops.compat.fla_backend` needs, for tests without FLA.

The registries follow the protocol of `fla.backends` in FLA 0.6.0: which methods of a back-end are
called, in which order, and what happens if the back-end declines. The dispatched functions compute
nothing: they raise `OwnFunctionError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

MODULES = {
    "chunk_dplr_delta_rule": "fla.ops.generalized_delta_rule.dplr.chunk",
    "fused_recurrent_simple_gla": "fla.ops.simple_gla.fused_recurrent",
    "fused_chunk_simple_gla": "fla.ops.simple_gla.fused_chunk",
    "layer_norm_fwd": "fla.modules.norm.layernorm",
    "layer_norm_bwd": "fla.modules.norm.layernorm",
}
OPERATIONS = {"chunk_dplr_delta_rule": "generalized_delta_rule.dplr"}


class OwnFunctionError(Exception):
    """No back-end accepted the call, so the function itself was called."""


class BaseBackend:
    """The base class of registered back-ends."""

    backend_type = "base"
    env_var: str | None = None
    priority = 5
    implementation: Callable[..., Any] | None = None
    verifier: Callable[..., Any] | None = None

    @classmethod
    def is_available(cls) -> bool:
        """Whether the packages that the back-end needs are installed."""
        return True

    def is_enabled(self) -> bool:
        """Whether the user enabled the back-end."""
        return self.env_var is None or os.environ.get(self.env_var, "1") != "0"


class Registry:
    """The back-ends of one function, or of several that share an operation."""

    def __init__(self) -> None:
        self.backends: dict[str, Any] = {}

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        """Ask the back-ends, lower priorities first; call the function itself if all decline."""
        for backend in sorted(self.backends.values(), key=lambda b: b.priority):
            if not (backend.is_available() and backend.is_enabled()):
                continue
            ask = backend.verifier or getattr(backend, f"{name}_verifier", None)
            try:
                accepted = ask is None or ask(*given, **named)[0]
            except Exception:  # FLA treats an error of a verifier as a refusal
                accepted = False
            serve = backend.implementation or getattr(backend, name, None)
            if accepted and serve is not None:
                return serve(*given, **named)
        raise OwnFunctionError(name)


def modules() -> Iterator[ModuleType]:
    """The modules of a made-up FLA."""
    operations: dict[str, Registry] = {}
    functions: dict[Callable[..., Any], Registry] = {}

    def register(
        entry_point: Any, *, backend: Any = None, verifier: Any = None, env_var: Any = None
    ) -> Callable[[Any], Any]:
        def decorated(made: Any) -> Any:
            if isinstance(made, type):
                found: Any = made()
            else:
                found = (backend or BaseBackend)()
                found.implementation = made
            found.verifier = verifier
            found.env_var = env_var or found.env_var
            registry = (operations if isinstance(entry_point, str) else functions)[entry_point]
            registry.backends[found.backend_type] = found
            return made

        return decorated

    made = {name: ModuleType(name) for name in ("fla", "fla.backends", *MODULES.values())}
    made["fla"].__dict__.update(__version__="0.6.0", __path__=[])
    made["fla.backends"].__dict__.update(BaseBackend=BaseBackend, register=register)
    for name, module in MODULES.items():
        registry = Registry()
        function = _dispatched(name, registry)
        if name in OPERATIONS:
            operations[OPERATIONS[name]] = registry
        else:
            functions[function] = registry
        setattr(made[module], name, function)
    yield from made.values()


def _dispatched(name: str, registry: Registry) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        return registry.call(name, *given, **named)

    return call
