"""Let the modules of an existing model call the library: `patch`.

Two kinds of modules are swapped. RMSNorm modules of any class get another `forward`
(`patching_norms.py`). Modules whose methods call a published function that the library serves, such
as the layers of FLA, keep their code, in which the name of that function refers to the library's
adapter (`patching_functions.py`). A trial call decides whether a module is swapped.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


class Swapped(NamedTuple):
    """A module that calls the library.

    Attributes:
        name: The module's name in `model.named_modules()`.
        kind: Name of the module's class.
        function: The operator that it calls now, with the arguments that the trial determined; or
            the replaced published functions, each with the operator that serves it.
        untried: Why there was no trial; empty if there was one.
    """

    name: str
    kind: str
    function: str
    untried: str = ""


class Left(NamedTuple):
    """A module that looked like one that can be swapped, but was left unchanged."""

    name: str
    kind: str
    why: str


class Patched:
    """The modules that `patch` replaced and those it left unchanged, with reasons; printable.

    Attributes:
        swapped: The modules that call the library now.
        left: Modules that are called RMSNorm, or call a function that the library knows, and are
            unchanged, with the reasons.
    """

    def __init__(
        self, swapped: tuple[Swapped, ...], left: tuple[Left, ...],
        methods: tuple[tuple[nn.Module, str], ...],
    ) -> None:
        self.swapped = swapped
        self.left = left
        self._methods = methods

    def undo(self) -> None:
        """Restore the modules' own methods."""
        for module, name in self._methods:
            module.__dict__.pop(name, None)

    def __repr__(self) -> str:
        lines = [f"{len(self.swapped)} modules call the library"]
        lines += [f"  {s.name} ({s.kind}): {s.function}" + (f"; {s.untried}" if s.untried else "")
                  for s in self.swapped]
        lines += [f"  left alone: {found.name} ({found.kind}): {found.why}" for found in self.left]
        return "\n".join(lines)


def patch(model: nn.Module) -> Patched:
    """Let the modules of a model call the library, and list what was swapped.

        print(kgen_ops.patch(model))

    `patch` swaps RMSNorm modules of any class, and modules whose methods call a function of FLA or
    of the RWKV models for transformers that `kgen_ops.compat` has. Modules keep their class,
    parameters and position, so checkpoints, hooks and optimizers see no change. A module is swapped
    only if a trial call on its own device gives the library's result. A function of FLA needs a GPU
    for the trial; without one, `patch` recognises it by its name and its arguments, and the list
    says so.

    A swapped module runs its own code for calls that the library does not serve in the
    same way: with further arguments, with other dtypes, or on a device that the library was not
    tuned for.

    Args:
        model: Any module, for instance a model of `transformers`, or built with `torch.nn.RMSNorm`.
    Returns:
        The swapped modules; `undo()` of the result reverts all changes.
    Raises:
        TypeError: If `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: got {type(model).__name__}, which is no torch.nn.Module\n"
                        "  next: pass the model, or one of its layers")
    from .patching_functions import Functions  # imported here to keep the library's import light

    library = importlib.import_module(__name__.rsplit(".", maxsplit=2)[0])
    functions = Functions(library, lambda operator: _on_cpu(library, operator))
    swapped: list[Swapped] = []
    left: list[Left] = []
    methods: list[tuple[nn.Module, str]] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "rmsnorm" in kind.lower() and not any(module.children()):
            found = _norm(library, module)
        else:
            found = functions.swapped_methods(module)
        if isinstance(found, str):
            left.append(Left(name, kind, found))
        elif found is not None:
            made, function, untried = found
            for method, body in made.items():
                # In the instance's dict, where Python finds it before the class's. A method of the
                # module, so that `copy.deepcopy` binds it to the copy.
                module.__dict__[method] = types.MethodType(body, module)
                methods.append((module, method))
            swapped.append(Swapped(name, kind, function, untried))
    return Patched(tuple(swapped), tuple(left), tuple(methods))


# (methods by name, text of what they call, why there was no trial); or a reason to leave the module
# unchanged; or None if the module is not of a kind that `patch` handles.
Found = tuple[dict[str, Callable[..., Any]], str, str] | str | None


def _norm(library: types.ModuleType, module: nn.Module) -> Found:
    from .patching_norms import forward_of, found_out

    if not hasattr(library, "rmsnorm"):
        return "the library has no rmsnorm"
    norm = found_out(module)
    if isinstance(norm, str):
        return norm
    package = importlib.import_module(f"{library.__name__}.rmsnorm")
    forward = forward_of(module, norm, package.rmsnorm, _on_cpu(library, "rmsnorm"))
    return {"forward": forward}, str(norm), ""


def _on_cpu(library: types.ModuleType, operator: str) -> bool:
    """Whether the library was tuned for the host."""
    package = importlib.import_module(f"{library.__name__}.{operator}")
    found: bool = package.FORWARD.tables.tuned_for_host()
    return found
