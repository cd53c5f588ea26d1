"""YAML as a tree with line numbers, so that every error names `file:line`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from kgen.errors import SpaceError, UserError, shortened, suggest, why_unreadable

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast
_MOST_DEPTH = 100
Scalar = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class Tree:
    """A YAML node.

    Attributes:
        node: PyYAML's node.
        path: The file, for messages.
        error: Exception class for mistakes in this file.
        key: The mapping key whose value this node is; None if it is not a value of a mapping.
    """

    node: yaml.Node
    path: str
    error: type[UserError]
    key: yaml.Node | None = None

    @property
    def where(self) -> str:
        """`file:line`, counted from 1."""
        return f"{self.path}:{self.node.start_mark.line + 1}"

    @property
    def place(self) -> tuple[str, int]:
        """File and character position, which identify the node."""
        return self.path, self.node.start_mark.index

    def fail(self, message: str) -> UserError:
        """Build (not raise) an error at this place."""
        return self.error(f"{self.where}: {message}")

    def fail_at_key(self, message: str) -> UserError:
        """Build an error at this entry's name, which may be lines above its value."""
        return Tree(self.key or self.node, self.path, self.error).fail(message)

    @property
    def is_mapping(self) -> bool:
        """Whether the node is a mapping."""
        return isinstance(self.node, yaml.MappingNode)

    @property
    def is_scalar(self) -> bool:
        """Whether the node is a single value."""
        return isinstance(self.node, yaml.ScalarNode)

    def mapping(self) -> dict[str, Tree]:
        """Return the entries of a mapping, in order.

        Raises:
            UserError: If this is no mapping, a key is no text, or a key is repeated.
        """
        if not isinstance(self.node, yaml.MappingNode):
            raise self.fail("a mapping (name: value) is expected here")
        entries: dict[str, Tree] = {}
        for key_node, value_node in self.node.value:
            key = str(key_node.value)
            child = Tree(value_node, self.path, self.error, key_node)
            if key in entries:
                raise child.fail_at_key(f"'{key}' is written twice")
            entries[key] = child
        return entries

    def fields(self, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Tree]:
        """Return a mapping's entries after checking their names.

        Raises:
            UserError: If a name is unknown or a required one is missing.
        """
        entries = self.mapping()
        required = list(required)
        known = [*required, *optional]
        for key, child in entries.items():
            if key not in known:
                raise child.fail_at_key(f"unknown key '{key}'\n  {suggest(key, known)}")
        for key in required:
            if key not in entries:
                raise self.fail(f"'{key}' is missing\n  required: {', '.join(required)}")
        return entries

    def sequence(self) -> list[Tree]:
        """Return the items of a list.

        Raises:
            UserError: If this is no list.
        """
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.fail("a list is expected here")
        return [Tree(item, self.path, self.error) for item in self.node.value]

    def scalar(self) -> Scalar:
        """Return a number, boolean, text or null as YAML 1.1 reads it.

        Raises:
            UserError: If this is no scalar.
        """
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.fail("one value is expected here")
        loader = yaml.SafeLoader("")
        try:
            value: Scalar = loader.construct_object(self.node)
        except (yaml.YAMLError, ValueError) as problem:
            raise self.fail(
                f"'{shortened(self.node.value)}' is not a value: {problem}"
            ) from None
        if not isinstance(value, int | float | bool | str | None):
            raise self.fail(f"'{self.node.value}' is neither number, boolean nor text")
        return value

    def text(self) -> str:
        """Return the scalar as it is written.

        Raises:
            UserError: If this is no scalar.
        """
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.fail("one value is expected here")
        return str(self.node.value)


def read_yaml(path: Path, error: type[UserError] = SpaceError, shown_as: str = "") -> Tree:
    """Parse a YAML file.

    Args:
        path: The file.
        error: Exception class of its mistakes.
        shown_as: Name for messages and reports; default: the path.

    Raises:
        UserError: If it cannot be read or is not YAML; the text has file and line.
    """
    name = shown_as or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{name}: cannot be read: {why_unreadable(problem)}") from None
    try:
        refuse_traps(text, name, error, aliases=True)
        node = yaml.compose(text, Loader=LOADER)
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise error(f"{name}:{line}: not valid YAML: {problem.problem}") from None
    except yaml.YAMLError as problem:
        raise error(f"{name}:1: not valid YAML: {problem}") from None
    if node is None:
        raise error(f"{name}:1: the file is empty")
    return Tree(node, name, error)


def refuse_traps(
    text: str, name: str, error: type[UserError], aliases: bool = False
) -> None:
    """Refuse a file nested so deeply that the recursion of libyaml would end the process.

    Args:
        text: YAML.
        name: Name of the file, for messages.
        error: Exception class for mistakes in the file.
        aliases: Whether `*name` is allowed. kgen writes no aliases, and a few lines of aliases of
            aliases can expand to a value of any size.
    Raises:
        UserError: If the file is too deep, or has aliases.
        yaml.YAMLError: If it is not YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent) and not aliases:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise error(f"{name}:{line}: '*{shortened(str(event.anchor))}' is an alias; kgen "
                        "writes none\n  next: restore the file from version control")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MOST_DEPTH:
            mark = event.start_mark
            line = mark.line + 1 if mark else 1
            raise error(f"{name}:{line}: nested more than {_MOST_DEPTH} levels deep")
