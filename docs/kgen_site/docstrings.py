"""Docstrings of kgen as reStructuredText, which Sphinx's autodoc expects.

The docstrings have Google's sections, Markdown's code spans, and formulas as plain lines. Read as
reStructuredText, `a * b` opens an emphasis and a formula of three lines becomes one line. So all
characters that mean something there are escaped, formulas become literal blocks, and sections
become fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

# Section -> its heading on the site.
_LISTS = {"Args": "Parameters", "Attributes": "Attributes"}
_TEXTS = {"Returns": "Returns", "Yields": "Yields"}
_SECTION = re.compile(rf"(?P<name>{'|'.join([*_LISTS, *_TEXTS, 'Raises'])}):(?P<rest>.*)")
_SOURCE = re.compile(r"Source: (?P<text>.*)")
_ENTRY = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<text>.*)")
# `y = ...`, `S_t = ...`, `G_{t-1} = ...`, `out[b, c, t] = ...` at the start of a line.
_FORMULA = re.compile(r"[A-Za-z][\w']*(?:\{[^}]*\}|\[[^\]]*\])? = \S")
_MARK = re.compile(r"\(?\w+[.)]\s|(?!``)[^\w\s\\(]")
_SPECIAL = re.compile(r"[\\*_|`]")


class DocstringError(ValueError):
    """A docstring does not have the form that kgen's docstrings have."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a docstring: `name` is empty for prose."""

    name: str
    lines: tuple[str, ...]


def to_rst(lines: Sequence[str], parameters: Iterable[str] | None = None) -> list[str]:
    """Return a docstring as reStructuredText.

    Args:
        lines: The docstring without its common indentation.
        parameters: Names that `Args` may describe; None: any.
    Raises:
        DocstringError: If a section is malformed, or describes what is no parameter.
    """
    fields: list[str] = []
    prose: list[str] = []
    for section in _sections(lines):
        if section.name in _LISTS:
            entries = [_named(section, entry) for entry in _joined(section.lines)]
            if section.name == "Args" and parameters is not None:
                _check_parameters(entries, list(parameters))
            fields += _list(_LISTS[section.name], entries)
        elif section.name == "Raises":
            # Sphinx links the names of exceptions.
            fields += [f":raises {name}: {block(text)}" for name, text in
                       (_named(section, entry) for entry in _joined(section.lines))]
        elif section.name in _TEXTS:
            fields += _texts(section)
        elif section.name == "Source":
            fields.append(f":Source: {block(' '.join(section.lines).strip())}")
        else:
            prose += _paragraphs(section.lines)
    return [*prose, "", *fields, ""]


def block(text: str) -> str:
    """Return a paragraph that begins no list, as `B. Peng 2022` would."""
    shown = inline(text)
    return f"\\{shown}" if _MARK.match(shown) else shown


def inline(text: str) -> str:
    """Return a line with its code spans as literals, and nothing else that has a meaning."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        raise DocstringError(f"a code span has no end: {text}")
    found = ""
    for index, part in enumerate(parts):
        if index % 2 == 0:
            found += _SPECIAL.sub(r"\\\g<0>", part)
            continue
        # A literal must not touch a letter: `x`s is ``x``\ s.
        before = "\\ " if parts[index - 1][-1:].isalnum() else ""
        after = "\\ " if parts[index + 1][:1].isalnum() else ""
        found += f"{before}``{part}``{after}"
    return found


def _sections(lines: Sequence[str]) -> Iterator[Section]:
    """Split; a section ends with the next line that is not indented."""
    name, held = "", list[str]()
    for line in lines:
        if line[:1].strip():  # not indented, not blank
            header = _SECTION.match(line)
            if header and header["rest"].strip():
                raise DocstringError(f"'{line}': entries of a section stand on lines of their own")
            source = _SOURCE.match(line)
            is_over = name not in ("", "Source") or (name == "Source" and not held[-1].strip())
            if header or source or is_over:
                yield Section(name, tuple(held))
                name, held = "", []
            if header:
                name = header["name"]
                continue
            if source:
                name, line = "Source", source["text"]
        held.append(line)
    yield Section(name, tuple(held))


def _named(section: Section, entry: str) -> tuple[str, str]:
    """Split `name: text`; several names are separated by commas."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise DocstringError(f"{section.name}: '{entry}' is not 'name: text'")
    return match["names"], match["text"]


def _check_parameters(entries: Sequence[tuple[str, str]], known: Sequence[str]) -> None:
    described = {name for names, _ in entries for name in names.split(", ")}
    if unknown := described - set(known):
        raise DocstringError(
            f"Args describes {', '.join(sorted(unknown))}\n  parameters: {', '.join(known)}"
        )


def _list(heading: str, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield f":{heading}:"
    for names, text in entries:
        yield f"    * **{inline(names)}**: {inline(text)}"


def _texts(section: Section) -> Iterator[str]:
    """What is returned: a list if there are several named results, else one text.

    What follows the named results without a name is a text after the list.
    """
    entries = list(_joined(section.lines))
    heading = _TEXTS[section.name]
    named = list(takewhile(_ENTRY.fullmatch, entries))
    if len(named) < 2:
        yield f":{heading}: {block(' '.join(entries))}"
        return
    yield from _list(heading, [_named(section, entry) for entry in named])
    if rest := entries[len(named):]:
        yield from ("", f"    {block(' '.join(rest))}")


def _joined(lines: Sequence[str]) -> Iterator[str]:
    """Entries, each on one line: a line with more indentation belongs to the entry before it."""
    shown = [line for line in lines if line.strip()]
    if not shown:
        raise DocstringError("a section has no entries")
    base = min(len(line) - len(line.lstrip()) for line in shown)
    held = ""
    for line in shown:
        if line[base] != " " and held:
            yield held
            held = ""
        held = f"{held} {line.strip()}".strip()
    yield held


def _paragraphs(lines: Sequence[str]) -> Iterator[str]:
    for paragraph in "\n".join(lines).strip("\n").split("\n\n"):
        rows = paragraph.splitlines()
        if not rows:
            continue
        yield ""
        if all(row.startswith("    ") for row in rows):
            yield from _literal(rows, "python")
        elif any(_FORMULA.match(row) for row in rows):
            # `Gradients, with g = ...:` says what follows.
            if rows[0].endswith(":") and not _FORMULA.match(rows[0]):
                yield block(rows.pop(0))
                yield ""
            yield from _literal([f"    {row}" for row in rows], "text")
        else:
            yield block(" ".join(rows))


def _literal(rows: Sequence[str], language: str) -> Iterator[str]:
    yield f".. code-block:: {language}"
    yield ""
    yield from rows
