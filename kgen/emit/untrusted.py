"""Check that the values of a library's tables are data before Python is generated from them.

Launch expressions, conditions and sizes must be in the language of search spaces
(`kgen.model.expr`), names must be identifiers, titles and labels plain words. Anything else is an
error that names the file and the key: a table may come from a colleague, or from a merge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kgen.errors import ExprError, RecordError
from kgen.model.expr import parse_expr

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_WORD = re.compile(r"[\w.-]*", re.ASCII)  # digests, record ids, dtypes, architectures
_TITLE = re.compile(r"[\w .,:;()/+=%-]*", re.ASCII)
_PLAIN = (bool, int, float)


def require_plain_data(path: Path, table: Mapping[str, Any]) -> None:
    """Refuse a table or `safe.yaml` in which a text is not of the form that its key requires.

    Args:
        path: The file, for the message.
        table: The file's content. Missing keys and wrong types are reported by the file's reader.
    Raises:
        RecordError: With the file, the key and the text.
    """
    _Check(path).table(table)


class _Check:
    """The checks of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def table(self, table: Mapping[str, Any]) -> None:
        """Check all texts of a file."""
        gpu = table.get("gpu") or {}
        self._matches("gpu.name", gpu.get("name", ""), _WORD)
        self._matches("gpu.arch", gpu.get("arch", ""), _WORD)
        for key in ("title", "device_names"):
            self._all(f"gpu.{key}", gpu.get(key, ""), _TITLE)
        self._pairs("gpu.facts", gpu.get("facts") or {})
        for place, row in enumerate(table.get("rows") or ()):
            self._row(f"rows[{place}]", row)
        for place, rule in enumerate(table.get("rules") or ()):
            self._rule(f"rules[{place}]", rule)

    def _row(self, key: str, row: Mapping[str, Any]) -> None:
        for name in ("pass", "variant"):
            self._matches(f"{key}.{name}", row.get(name, ""), _IDENTIFIER)
        for name in ("kernel", "record", "origin"):
            self._matches(f"{key}.{name}", row.get(name, ""), _WORD)
        for name in ("dims", "dtypes", "config"):
            self._pairs(f"{key}.{name}", row.get(name) or {})
        code = row.get("code", "")
        codes = code.items() if isinstance(code, Mapping) else [("code", code)]
        for arch, digest in codes:
            self._matches(f"{key}.code", arch, _WORD)
            self._matches(f"{key}.code.{arch}", digest, _WORD)
        self._all(f"{key}.constants", row.get("constants") or (), _IDENTIFIER)
        plan = row.get("plan") or {}
        for place, launch in enumerate(plan.get("launches") or ()):
            self._launch(f"{key}.plan.launches[{place}]", launch)
        for place, workspace in enumerate(plan.get("workspaces") or ()):
            at = f"{key}.plan.workspaces[{place}]"
            for name, value in workspace.items():
                if name == "elements":
                    self._expression(f"{at}.{name}", value)
                else:
                    self._matches(f"{at}.{name}", value, _WORD)
        for place, condition in enumerate(plan.get("conditions") or ()):
            self._expression(f"{key}.plan.conditions[{place}]", condition)

    def _launch(self, key: str, launch: Mapping[str, Any]) -> None:
        self._matches(f"{key}.kernel", launch.get("kernel", ""), _IDENTIFIER)
        self._matches(f"{key}.kinds", launch.get("kinds", ""), re.compile("[pfq]*"))
        for name in ("grid", "block"):
            for axis, extent in zip("xyz", launch.get(name) or (), strict=False):
                self._expression(f"{key}.{name}.{axis}", extent)
        self._expression(f"{key}.smem", launch.get("smem", "0"))
        for place, argument in enumerate(launch.get("args") or ()):
            self._expression(f"{key}.args[{place}]", argument)

    def _rule(self, key: str, rule: Mapping[str, Any]) -> None:
        self._matches(f"{key}.pass", rule.get("pass", ""), _IDENTIFIER)
        for name in ("dtypes", "constants"):
            self._pairs(f"{key}.{name}", rule.get(name) or {})
        self._tree(f"{key}.tree", rule.get("tree") or {})

    def _tree(self, key: str, tree: Mapping[str, Any]) -> None:
        self._all(f"{key}.rows", tree.get("rows") or (), _WORD)
        self._all(f"{key}.product_of", tree.get("product_of") or (), _IDENTIFIER)
        if "at_most" in tree:
            self._matches(f"{key}.at_most", tree["at_most"], _WORD)
        for side in ("below", "above"):
            if side in tree:
                self._tree(f"{key}.{side}", tree[side])

    def _pairs(self, key: str, pairs: Mapping[str, Any]) -> None:
        for name, value in pairs.items():
            self._matches(key, name, _IDENTIFIER)
            self._matches(f"{key}.{name}", value, _WORD)

    def _all(self, key: str, values: str | Iterable[Any], allowed: re.Pattern[str]) -> None:
        for value in [values] if isinstance(values, str) else values:
            self._matches(key, value, allowed)

    def _matches(self, key: str, value: Any, allowed: re.Pattern[str]) -> None:
        if isinstance(value, _PLAIN):
            return
        if not isinstance(value, str) or (value and not allowed.fullmatch(value)):
            kind = {
                _IDENTIFIER.pattern: "an identifier",
                _WORD.pattern: "a word of letters, digits, '.', '_' and '-'",
                _TITLE.pattern: "plain words on one line",
            }.get(allowed.pattern, f"text like {allowed.pattern}")
            raise self._refused(key, value, f"must be {kind}")

    def _expression(self, key: str, text: Any) -> None:
        try:
            if not isinstance(text, str):
                raise ExprError("it is no text")
            parse_expr(text)
        except ExprError as problem:
            raise self._refused(key, text, f"is no launch expression: {problem}") from None

    def _refused(self, key: str, value: Any, why: str) -> RecordError:
        shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        return RecordError(
            f"{self._path}: {key}: {shown if len(shown) < 80 else shown[:77] + '...'} {why}\n"
            "  kgen did not write this: restore the file from version control"
        )
