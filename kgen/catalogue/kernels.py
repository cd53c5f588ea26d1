"""The kernels of a template and their parameters, read from its text.

A template is CUDA with Jinja lines. This module reads the name of each `extern "C" __global__`
function and, per parameter, its name and the kind of value that a launch must pass.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kgen.errors import ExprError, SpaceError, TemplateError, why_unreadable
from kgen.model.config import Value
from kgen.model.expr import parse_expr
from kgen.runtime.spelling import spell

POINTER, INT64, FLOAT = "p", "q", "f"  # how a launch passes it: address, `long long`, `float`
KIND_TEXT = {POINTER: "a pointer", INT64: "a 64-bit integer", FLOAT: "a float"}
_INT64_TYPES = {"i64", "long long", "std::int64_t", "int64_t"}
_MOST_FORMS = 64  # texts that the `//% if` lines in one parameter list can give

_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\b')
_NAME = re.compile(r"\s*(\w+)\s*(?=\()")
_CTA_GROUPS = re.compile(r"\bKGEN_EXPORT_CTA_GROUPS\(\s*(\w+)")
_STATEMENT = re.compile(r"^[ \t]*//%[ \t]*(\w+)[ \t]*(.*?)[ \t]*$")
_COMMENTS = re.compile(r"/\*.*?\*/|//(?!%)[^\n]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class KernelParam:
    """One parameter of a kernel: its name, and the kind of value that a launch passes."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's parameters in order, and the place where it is declared (`file:line`).

    `has_grid_barriers`: whether the kernel's CTAs wait for each other; its template then exports it
    with KGEN_EXPORT_CTA_GROUPS.
    """

    name: str
    params: tuple[KernelParam, ...]
    where: str
    has_grid_barriers: bool = False


def kernels_of(
    path: Path, settings: Mapping[str, Value], shown_as: str = ""
) -> dict[str, Kernel]:
    """Read the kernels of a template.

    Args:
        path: The template.
        settings: The operator's settings of the family's templates; `//% if` branches that the
            settings rule out are ignored.
        shown_as: Name for messages; default: the path.

    Raises:
        SpaceError: If a parameter list cannot be parsed, or is not the same for all configs.
        TemplateError: If the file cannot be read.
    """
    name = shown_as or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise TemplateError(f"{path}: cannot be read: {why_unreadable(problem)}") from None
    text = _COMMENTS.sub(lambda found: "\n" * found[0].count("\n"), text)
    lines = _with_settings(text.split("\n"), {k: spell(v) for k, v in settings.items()})
    text = "\n".join(lines)
    waiting = set(_CTA_GROUPS.findall(text))
    kernels: dict[str, Kernel] = {}
    for found in _KERNEL.finditer(text):
        where = f"{name}:{text.count(chr(10), 0, found.start()) + 1}"
        kernel = _kernel(text, found.end(), where)
        if kernels.get(kernel.name, kernel).params != kernel.params:
            raise SpaceError(f"{where}: kernel '{kernel.name}' is declared twice, differently")
        kernels.setdefault(
            kernel.name, replace(kernel, has_grid_barriers=kernel.name in waiting))
    return kernels


def _kernel(text: str, start: int, where: str) -> Kernel:
    named = _NAME.match(text, start)
    while named is not None and named[1].startswith("__"):  # __launch_bounds__(...)
        start = _closing(text, named.end(), where) + 1
        named = _NAME.match(text, start)
    if named is None:
        raise SpaceError(f'{where}: no kernel name follows extern "C" __global__ void')
    end = _closing(text, named.end(), where)
    forms = dict.fromkeys(
        tuple(_param(part, named[1], where) for part in _split(form))
        for form in _forms(text[named.end() + 1 : end].split("\n"), named[1], where)
    )
    if len(forms) > 1:
        lists = "\n  ".join(", ".join(p.name for p in form) for form in forms)
        raise SpaceError(
            f"{where}: the parameters of kernel '{named[1]}' depend on a config:\n  {lists}\n"
            "  give it one list; only settings of a family (`set:`) may change it"
        )
    return Kernel(named[1], next(iter(forms)), where)


def _closing(text: str, opening: int, where: str) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise SpaceError(f"{where}: a parenthesis is not closed")


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in (" ".join(part.split()) for part in parts) if part]


def _param(text: str, kernel: str, where: str) -> KernelParam:
    found = re.fullmatch(r"(.*[\s*&])(\w+)", text)
    if found is None:
        raise SpaceError(f"{where}: parameter '{text}' of kernel '{kernel}' has no name or type")
    words = [w for w in found[1].replace("*", " * ").split() if w not in ("const", "__restrict__")]
    spelled = " ".join(words).removeprefix("kgen::")
    if "*" in words:
        return KernelParam(found[2], POINTER)
    if spelled in _INT64_TYPES:
        return KernelParam(found[2], INT64)
    if spelled == "float":
        return KernelParam(found[2], FLOAT)
    raise SpaceError(
        f"{where}: parameter '{text}' of kernel '{kernel}' has type '{spelled}'\n"
        "  a launch passes pointers, kgen::i64 and float"
    )


# --- Jinja lines -----------------------------------------------------------------------------


def _with_settings(lines: Sequence[str], known: dict[str, str]) -> list[str]:
    """Blank out the branches that settings rule out, and the `//% if` lines that they decide."""
    kept: list[str] = []
    # For each open `if`: whether the settings decide it, whether one of its branches was taken so
    # far, and whether the present branch is taken.
    blocks: list[tuple[bool, bool, bool]] = []
    for line in lines:
        found = _STATEMENT.match(line)
        word, rest = (found[1], found[2]) if found else ("", "")
        dead = any(decided and not live for decided, _, live in blocks)
        if word == "if":
            truth = None if dead else _truth(rest, known)
            blocks.append((truth is not None, bool(truth), bool(truth)))
            kept.append("" if dead or truth is not None else line)
        elif word in ("elif", "else", "endif") and blocks:
            decided, taken, _ = blocks.pop()
            dead = any(d and not live for d, _, live in blocks)
            if word != "endif":
                live = not taken and (word == "else" or bool(_truth(rest, known)))
                blocks.append((decided, taken or live, live))
            kept.append("" if dead or decided else line)
        else:
            if word == "set" and not dead and "=" in rest:
                alias, _, value = rest.partition("=")
                truth = _truth(value.strip(), known)
                if truth is not None:
                    known[alias.strip()] = str(truth)
            kept.append("" if dead else line)
    return kept


def _truth(condition: str, known: Mapping[str, str]) -> bool | None:
    """The value of a condition under the settings; None if it depends on other names."""
    try:
        expr = parse_expr(condition)
        if not expr.names <= known.keys():
            return None
        booleans = {"True": True, "False": False}  # values of earlier `//% set` lines
        return bool(expr({name: booleans.get(value, value) for name, value in known.items()}))
    except ExprError:
        return None


def _forms(lines: Sequence[str], kernel: str, where: str) -> Iterable[str]:
    """Yield all texts that a parameter list can render to: one branch of each `//% if` in it."""
    choices: list[list[str]] = [[""]]
    branches: list[str] | None = None
    has_else = False
    for line in lines:
        found = _STATEMENT.match(line)
        word = found[1] if found else ""
        if word == "if" and branches is None:
            branches, has_else = [""], False
        elif word in ("elif", "else") and branches is not None:
            branches.append("")
            has_else = word == "else"
        elif word == "endif" and branches is not None:
            choices.append(branches if has_else else [*branches, ""])
            branches = None
        elif found:
            raise SpaceError(
                f"{where}: '{line.strip()}' among the parameters of kernel '{kernel}'\n"
                "  only `//% if`, not nested, may stand there"
            )
        elif branches is not None:
            branches[-1] += line + "\n"
        else:
            choices.append([line + "\n"])
    count = 1
    for options in choices:
        count *= len(options)
    if count > _MOST_FORMS:
        raise SpaceError(f"{where}: kernel '{kernel}' has more than {_MOST_FORMS} parameter lists")
    return map("".join, itertools.product(*choices))
