"""The reference pages: functions of the library, modules of kgen, commands.

The pages name what they describe; Sphinx's autodoc adds signatures and docstrings.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kgen_site.docstrings import block

_OWN = ("kgen.operators.base", "kgen.model.signature", "kgen.model.problem")
_KGEN = (
    "kgen.catalogue", "kgen.tune", "kgen.search.feasible", "kgen.search.proposer", "kgen.report",
    "kgen.emit", "kgen.errors",
)


def operator_page(library: Any) -> str:
    """The functions of the operators of a generated library."""
    text = (
        "# Operators\n\n`pip install ./generated` installs `kgen_ops`. These are its operators; "
        "[the library's own functions](library.md) show and change what serves a call. `None` "
        "stands for a tensor that a call leaves out.\n\n"
    )
    for operator, functions in _operators(library).items():
        text += f"## {operator}\n\n{_rst(_documented(library, functions))}"
    return text


def library_page(library: Any) -> str:
    """What `kgen_ops` has besides operators."""
    of_operators = {name for names in _operators(library).values() for name in names}
    kinds: dict[str, list[str]] = {"Functions": [], "Types": [], "Errors and warnings": []}
    for name in library.__all__:
        if name not in of_operators:
            kinds[_kind(getattr(library, name))].append(name)
    text = "# Library\n\nWhat `kgen_ops` has besides the [operators](operators.md).\n\n"
    for kind, names in kinds.items():
        text += f"## {kind}\n\n{_rst(_documented(library, names))}"
    for package in _packages(library):
        text += f"## {package.__name__}\n\n{_summary(package)}\n\n"
        text += _rst(_documented(package, package.__all__))
    return text


def published_page(compat: Any) -> str:
    """The functions of `kgen_ops.compat`, by the module that has them."""
    modules: dict[str, list[str]] = {}
    for name in compat.__all__:
        modules.setdefault(getattr(compat, name).__module__, []).append(name)
    text = (
        "# kgen_ops.compat\n\nFunctions under their published names. "
        "[Published functions](../compat.md) tells what is converted.\n\n"
    )
    for module, names in sorted(modules.items()):
        summary = _summary(importlib.import_module(module))
        short = module.rpartition(".")[2]
        text += f"## {short}\n\n{summary}\n\n{_rst(_documented(compat, names))}"
    for found in pkgutil.iter_modules(compat.__path__, f"{compat.__name__}."):
        own = importlib.import_module(found.name)
        if hasattr(own, "__all__"):  # it is imported by its own name
            text += f"## {found.name.rpartition('.')[2]}\n\n{_summary(own)}\n\n"
            text += _rst(_documented(own, own.__all__))
    return text


def own_operators_page() -> str:
    """What a module of an operator imports."""
    return (
        "# Modules for operators of your own\n\n"
        "[The tutorial](../tutorials/new-operator.md) shows how they are used.\n\n"
        + _modules(_OWN)
    )


def kgen_page() -> str:
    """The modules of kgen that scripts use."""
    return (
        "# kgen in Python\n\nThe commands are made of these modules. "
        "[Architecture](../architecture.md) says which other modules there are.\n\n"
        + _modules(_KGEN)
    )


def command_page(parser: argparse.ArgumentParser) -> str:
    """All commands with their options and examples.

    Args:
        parser: Of `kgen`, with a subparser for each command.
    """
    text = f"# Commands\n\n{parser.description}\n\n{_examples(parser)}"
    for name, command in commands_of(parser).items():
        text += f"## {parser.prog} {name}\n\n"
        text += _rst([*_escaped(command.description), "", *_literal(command.format_usage())])
        options = [a for a in command._actions if not isinstance(a, argparse._HelpAction)]
        text += _rst(_options(f"{parser.prog} {name}", command, options)) + _examples(command)
    return text


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of the commands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise TypeError(f"'{parser.prog}' has no commands")


def _operators(library: Any) -> dict[str, list[str]]:
    """Operator -> its functions: those of a module of the library that is named after it."""
    found: dict[str, list[str]] = {}
    for name in library.__all__:
        package, _, module = getattr(library, name).__module__.partition(".")
        if package == library.__name__ and name.removesuffix("_backward") == module:
            found.setdefault(module, []).append(name)
    return found


def _packages(library: Any) -> Iterator[Any]:
    """The public packages of the library that export names, without that of published functions."""
    for found in pkgutil.iter_modules(library.__path__):
        if found.ispkg and not found.name.startswith("_") and found.name != "compat":
            package = importlib.import_module(f"{library.__name__}.{found.name}")
            if hasattr(package, "__all__"):
                yield package


def _kind(value: Any) -> str:
    if not inspect.isclass(value):
        return "Functions"
    return "Errors and warnings" if issubclass(value, Exception) else "Types"


def _documented(module: Any, names: Sequence[str]) -> Iterator[str]:
    """Directives of autodoc."""
    directives = {"Functions": "autofunction", "Types": "autoclass"}
    for name in names:
        directive = directives.get(_kind(getattr(module, name)), "autoexception")
        yield from (f".. {directive}:: {module.__name__}.{name}", "")


def _modules(modules: Sequence[str]) -> str:
    return "".join(f"## {name}\n\n{_rst([f'.. automodule:: {name}'])}" for name in modules)


def _summary(module: Any) -> str:
    return " ".join((inspect.getdoc(module) or "").split("\n\n")[0].split())


def _examples(parser: argparse.ArgumentParser) -> str:
    """The examples of a parser's epilog: lines of a comment and a command."""
    head, _, lines = (parser.epilog or "").partition("\n")
    if head != "examples:" or not lines:
        return ""
    text = "\n".join(line.removeprefix("  ") for line in lines.splitlines())
    return f"```shell\n{text}\n```\n\n"


def _options(
    program: str, parser: argparse.ArgumentParser, actions: Sequence[argparse.Action]
) -> Iterator[str]:
    yield from (f".. program:: {program}", "")
    for action in actions:
        values = _values(action)
        forms = [f"{name} {values}".strip() for name in action.option_strings] or [values]
        told = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield from (f".. option:: {', '.join(forms)}", "", f"   {block(told)}", "")


def _values(action: argparse.Action) -> str:
    """What follows an option, or stands for an argument."""
    if action.nargs == 0:
        return ""
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = action.metavar or action.dest.upper()
    shown = name if isinstance(name, str) else " ".join(name)
    return {"+": f"{shown} ...", "*": f"[{shown} ...]", "?": f"[{shown}]"}.get(
        str(action.nargs), shown)


def _escaped(text: str | None) -> list[str]:
    return [block(" ".join((text or "").split()))]


def _literal(text: str) -> Iterator[str]:
    yield from (".. code-block:: text", "")
    yield from (f"   {line}" for line in text.rstrip().splitlines())
    yield ""


def _rst(lines: Iterable[str]) -> str:
    return "\n".join(["```{eval-rst}", *lines, "```", "", ""])
