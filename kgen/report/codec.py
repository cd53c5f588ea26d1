"""Convert dataclasses to and from YAML. The dataclass is the schema; every deviation is an error.

`encode` and `decode` are for reports; `encode_as` and `decode_as` are for other documents of the
same style. An error names file, line, key path, the found value and the expected value.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

import yaml

from kgen.catalogue.yaml_tree import LOADER, refuse_traps
from kgen.errors import RecordError, shortened, suggest
from kgen.model.record import Fate
from kgen.report.model import SCHEMA, Report

_T = TypeVar("_T")
# Fields whose YAML key differs from their name.
_KEYS = {"pass_name": "pass"}
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_NULL = "tag:yaml.org,2002:null"


def encode(report: Report) -> str:
    """Return the YAML of a report; equal reports give equal text."""
    header = f"Tuning report of {report.operator} on {report.gpu}, written by kgen."
    return encode_as(report, header, report.schema)


def encode_as(document: Any, header: str, schema: int) -> str:
    """Return the YAML of a dataclass, which begins with a comment line and the schema's version."""
    data = {"schema": schema, **_encoded(document)}
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return f"# {header}\n{text}"


def decode(text: str, where: str) -> Report:
    """Read a report.

    Args:
        text: YAML.
        where: File name, for messages.
    Raises:
        RecordError: If the text is no YAML or deviates from the schema.
    """
    report = decode_as(Report, text, where, SCHEMA, "tune again")
    _check(report, where)
    return report


def decode_as(kind: type[_T], text: str, where: str, schema: int, again: str) -> _T:
    """Read a dataclass that `encode_as` wrote.

    Args:
        kind: The dataclass.
        text: YAML.
        where: File name, for messages.
        schema: The version that this kgen reads.
        again: How to make a document of this version, for the message.
    Raises:
        RecordError: If the text is no YAML or deviates from the dataclass.
    """
    try:
        refuse_traps(text, where, RecordError)
        node = yaml.compose(text, Loader=LOADER)
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise RecordError(f"{where}:{line}: not valid YAML: {problem.problem}") from None
    except yaml.YAMLError as problem:
        raise RecordError(f"{where}: not valid YAML: {problem}") from None
    if not isinstance(node, yaml.MappingNode):
        raise RecordError(f"{where}: a report is a mapping of keys")
    version = next((v for k, v in node.value if k.value == "schema"), None)
    if version is None or version.value != str(schema):
        found = "missing" if version is None else shortened(str(version.value))
        raise RecordError(f"{where}: schema is {found}; this kgen reads {schema}\n"
                          f"  read it with the kgen that wrote it, or {again}")
    return _Reader(where).value(kind, node, "")


def _check(report: Report, where: str) -> None:
    for index, problem in enumerate(report.problems):
        path = f"problems[{index}]"
        if problem.environment not in report.environments:
            hint = suggest(problem.environment, report.environments)
            raise RecordError(f"{where}: {path}.environment: '{problem.environment}' is not among "
                              f"'environments'\n  {hint}")
        for fate in problem.trials.fates:
            if fate not in list(Fate):
                raise RecordError(f"{where}: {path}.trials.fates: unknown fate '{fate}'\n"
                                  f"  {suggest(fate, list(Fate))}")
        for name, number in (("space.feasible", problem.space.feasible),
                             ("trials.count", problem.trials.count),
                             ("floor_us", problem.floor_us),
                             ("chosen.timing.median_us", problem.chosen.timing.median_us)):
            if not number >= 0:
                raise RecordError(f"{where}: {path}.{name}: {number} must be >= 0")


def _encoded(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {_KEYS.get(f.name, f.name): _encoded(getattr(value, f.name)) for f in fields(value)
                if f.name != "schema"}
    if isinstance(value, Mapping):
        return {str(key): _encoded(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_encoded(item) for item in value]
    # No measured quantity has more than six significant digits.
    return float(f"{value:.6g}") if isinstance(value, float) else value


class _Dumper(yaml.SafeDumper):
    """Sequences indented under their key, no aliases."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Reader:
    """Converts YAML nodes to values of annotated types."""

    def __init__(self, where: str) -> None:
        self.where = where

    def value(self, kind: type[_T], node: yaml.Node, path: str) -> _T:
        """Read a node as a type: a dataclass, a container, an optional or a scalar."""
        return typing.cast(_T, self._value(kind, node, path))

    def _value(self, kind: Any, node: yaml.Node, path: str) -> Any:
        if is_dataclass(kind):
            return self._dataclass(typing.cast(type, kind), node, path)
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is tuple:
            if not isinstance(node, yaml.SequenceNode):
                raise self._wrong("a list", node, path)
            return tuple(self._value(args[0], item, f"{path}[{index}]")
                         for index, item in enumerate(node.value))
        if origin is not None and issubclass(origin, Mapping):
            return {key: self._value(args[1], item, f"{path}.{key}")
                    for key, item in self._entries(node, path)}
        if origin in (types.UnionType, typing.Union):
            return self._union(args, node, path)
        return self._scalar((kind,), node, path)

    def _dataclass(self, kind: type, node: yaml.Node, path: str) -> Any:
        entries = dict(self._entries(node, path))
        hints = typing.get_type_hints(kind)
        known = {_KEYS.get(f.name, f.name): f for f in fields(kind)}
        for key, item in entries.items():
            if key not in known:
                raise self._error(item, f"{path}.{key}", f"unknown key\n  {suggest(key, known)}")
        values: dict[str, Any] = {}
        for key, f in known.items():
            if key in entries:
                values[f.name] = self._value(hints[f.name], entries[key], f"{path}.{key}")
            elif f.default is MISSING:
                raise self._error(node, f"{path}.{key}", "missing")
        return kind(**values)

    def _entries(self, node: yaml.Node, path: str) -> list[tuple[str, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self._wrong("a mapping of keys", node, path)
        entries: dict[str, yaml.Node] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, path, "a key is a word")
            if key.value in entries:
                raise self._error(key, f"{path}.{key.value}", "given twice")
            entries[key.value] = item
        return list(entries.items())

    def _union(self, kinds: tuple[Any, ...], node: yaml.Node, path: str) -> Any:
        if node.tag == _NULL and type(None) in kinds:
            return None
        rest = tuple(kind for kind in kinds if kind is not type(None))
        if len(rest) == 1:
            return self._value(rest[0], node, path)
        return self._scalar(rest, node, path)

    def _scalar(self, kinds: tuple[Any, ...], node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.ScalarNode):
            try:
                value = yaml.SafeLoader("").construct_object(node)
            except (yaml.YAMLError, ValueError, OverflowError):  # a tag, an infinite number
                raise self._wrong(" or ".join(_KINDS[k] for k in kinds), node, path) from None
            if type(value) in kinds:
                return value
            if float in kinds and type(value) is int:
                return float(value)
        raise self._wrong(" or ".join(_KINDS[kind] for kind in kinds), node, path)

    def _wrong(self, wanted: str, node: yaml.Node, path: str) -> RecordError:
        if isinstance(node, yaml.MappingNode):
            found = "a mapping"
        else:
            found = "a list" if isinstance(node, yaml.SequenceNode) else f"'{node.value}'"
        return self._error(node, path, f"must be {wanted}, not {found}")

    def _error(self, node: yaml.Node, path: str, text: str) -> RecordError:
        line = node.start_mark.line + 1
        return RecordError(f"{self.where}:{line}: {path.lstrip('.') or 'report'}: {text}")
