"""What is emitted so far, as data: `tables/<gpu>.yaml` and `safe.yaml` of each operator.

The Python tables are a function of these files, so a tune of one problem or one GPU adds to what
others left, and two people's tunes merge as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from kgen.catalogue.yaml_tree import LOADER
from kgen.emit.binding import LaunchText, PlanText, WorkspaceText
from kgen.errors import RecordError
from kgen.model.config import Value
from kgen.model.rule_tree import Leaf, LearntRule, Split, Tree

SCHEMA = 1
TUNED = "tuned"  # by a search
LEARNT = "learnt"  # measured while a rule was learnt, among few configs


@dataclass(frozen=True, slots=True)
class RowState:
    """A measured problem with its winner; the fields are those of the generated `Row`.

    `origin` says how the winner was found: `tuned` or `learnt`.
    """

    pass_name: str
    dims: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]
    variant: str
    config: tuple[tuple[str, Value], ...]
    constants: tuple[str, ...]
    kernel: str
    record: str
    median_us: float
    plan: PlanText
    origin: str = TUNED

    @property
    def problem(self) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
        """What a later tune of the same problem replaces; also the order of rows."""
        return (self.pass_name, tuple(v for _, v in self.dtypes), tuple(v for _, v in self.dims))


@dataclass(frozen=True, slots=True)
class SafeState:
    """The safe kernel of one pass and dtype combination."""

    pass_name: str
    dtypes: tuple[tuple[str, str], ...]
    variant: str
    config: tuple[tuple[str, Value], ...]
    kernel: str
    plan: PlanText


@dataclass(frozen=True, slots=True)
class GpuState:
    """The facts of a GPU that the library needs."""

    name: str
    title: str
    device_names: tuple[str, ...]
    arch: str
    facts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TableState:
    """All rows of one operator on one GPU, and the rules that choose among them, sorted."""

    gpu: GpuState
    rows: tuple[RowState, ...]
    rules: tuple[LearntRule, ...] = ()

    def with_rows(self, gpu: GpuState, rows: Iterable[RowState]) -> TableState:
        """Add rows; those of the same problem are replaced, and rules that named one are dropped.
        """
        merged = {row.problem: row for row in (*self.rows, *rows)}
        table = replace(self, gpu=gpu, rows=tuple(merged[key] for key in sorted(merged)))
        return table._with_rules(self.rules)

    def with_rules(self, rules: Iterable[LearntRule]) -> TableState:
        """Add rules; those of the same problems are replaced, and learnt rows that only these named
        are dropped.
        """
        merged = {rule.covers: rule for rule in (*self.rules, *rules)}
        before = {record for rule in self.rules for record in rule.records}
        named = {record for rule in merged.values() for record in rule.records}
        kept = [row for row in self.rows
                if row.origin == TUNED or row.record in named or row.record not in before]
        table = replace(self, rows=tuple(kept))
        return table._with_rules(merged[key] for key in sorted(merged))

    def _with_rules(self, rules: Iterable[LearntRule]) -> TableState:
        """These rules, without those that name a row that there is no more."""
        known = {row.record for row in self.rows}
        return replace(self, rules=tuple(rule for rule in rules if rule.records <= known))

    def of_fields(self, dtype_fields: Sequence[str]) -> TableState:
        """Drop rows from before the operator got its present dtype fields: no call finds them."""
        wanted = list(dtype_fields)
        table = replace(
            self, rows=tuple(row for row in self.rows if [n for n, _ in row.dtypes] == wanted)
        )
        return table._with_rules(self.rules)


def table_text(table: TableState) -> str:
    """Return the YAML of a table."""
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "gpu": {**asdict(table.gpu), "facts": dict(table.gpu.facts)},
        "rows": [_row(row) for row in table.rows],
    }
    if table.rules:
        data["rules"] = [_rule(rule) for rule in table.rules]
    return _dump("what the table of this GPU is generated from", data)


def safe_text(rows: Iterable[SafeState]) -> str:
    """Return the YAML of the safe kernels."""
    return _dump("what safe.py is generated from",
                 {"schema": SCHEMA, "rows": [_row(row) for row in rows]})


def read_tables(folder: Path) -> dict[str, TableState]:
    """Read every `<gpu>.yaml` of a folder; empty if there is none.

    Raises:
        RecordError: If a file is not what kgen wrote.
    """
    return {path.stem: read_table(path) for path in sorted(folder.glob("*.yaml"))}


def read_table(path: Path) -> TableState:
    """Read one table; see `read_tables`."""
    data = _load(path)
    try:
        gpu = data["gpu"]
        return TableState(
            GpuState(gpu["name"], gpu["title"], tuple(gpu["device_names"]), gpu["arch"],
                     tuple(gpu["facts"].items())),
            tuple(
                RowState(constants=tuple(row["constants"]), record=row["record"],
                         median_us=float(row["median_us"]), dims=tuple(row["dims"].items()),
                         origin=row.get("origin", TUNED), **_common(row))
                for row in data["rows"]
            ),
            tuple(_read_rule(rule) for rule in data.get("rules", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise _damaged(path, problem) from None


def read_safe(path: Path) -> tuple[SafeState, ...]:
    """Read `safe.yaml`; empty if there is none.

    Raises:
        RecordError: If the file is not what kgen wrote.
    """
    if not path.exists():
        return ()
    try:
        return tuple(SafeState(**_common(row)) for row in _load(path)["rows"])
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise _damaged(path, problem) from None


def _row(row: RowState | SafeState) -> dict[str, Any]:
    plan = {
        "launches": [
            _launch(launch) for launch in row.plan.launches
        ],
        "workspaces": [asdict(workspace) for workspace in row.plan.workspaces],
        "conditions": list(row.plan.conditions),
    }
    data: dict[str, Any] = {"pass": row.pass_name}
    if isinstance(row, RowState):
        data |= {"dims": dict(row.dims)}
    data |= {"dtypes": dict(row.dtypes), "variant": row.variant, "config": dict(row.config),
             "kernel": row.kernel}
    if isinstance(row, RowState):
        data |= {"constants": list(row.constants), "record": row.record,
                 "median_us": row.median_us}
        if row.origin != TUNED:
            data["origin"] = row.origin
    return {**data, "plan": plan}


def _launch(launch: LaunchText) -> dict[str, Any]:
    data = {**asdict(launch), "grid": list(launch.grid), "block": list(launch.block),
            "args": list(launch.args)}
    for key in ("overlaps", "early"):  # left out where false: so rows were before there were such
        if not data[key]:
            del data[key]
    return data


def _rule(rule: LearntRule) -> dict[str, Any]:
    return {"pass": rule.pass_name, "dtypes": dict(rule.dtypes), "constants": dict(rule.constants),
            "problems": rule.problems, "mean_loss": rule.mean_loss, "worst_loss": rule.worst_loss,
            "tree": _tree(rule.tree)}


def _tree(tree: Tree) -> dict[str, Any]:
    if isinstance(tree, Leaf):
        return {"rows": list(tree.rows)}
    return {"product_of": list(tree.dims), "at_most": tree.at_most,
            "below": _tree(tree.below), "above": _tree(tree.above)}


def _read_rule(rule: dict[str, Any]) -> LearntRule:
    return LearntRule(
        rule["pass"], tuple(rule["dtypes"].items()), tuple(rule["constants"].items()),
        _read_tree(rule["tree"]), int(rule["problems"]), float(rule["mean_loss"]),
        float(rule["worst_loss"]),
    )


def _read_tree(tree: dict[str, Any]) -> Tree:
    if "rows" in tree:
        return Leaf(tuple(tree["rows"]))
    return Split(tuple(tree["product_of"]), int(tree["at_most"]), _read_tree(tree["below"]),
                 _read_tree(tree["above"]))


def _common(row: dict[str, Any]) -> dict[str, Any]:
    plan = row["plan"]
    return {
        "pass_name": row["pass"],
        "dtypes": tuple(row["dtypes"].items()),
        "variant": row["variant"],
        "config": tuple(row["config"].items()),
        "kernel": row["kernel"],
        "plan": PlanText(
            tuple(
                LaunchText(launch["kernel"], _three(launch["grid"]), _three(launch["block"]),
                           launch["smem"], tuple(launch["args"]), launch["kinds"],
                           bool(launch.get("overlaps", False)),
                           bool(launch.get("early", False)))
                for launch in plan["launches"]
            ),
            tuple(WorkspaceText(**workspace) for workspace in plan["workspaces"]),
            tuple(plan["conditions"]),
        ),
    }


def _three(extents: list[str]) -> tuple[str, str, str]:
    x, y, z = extents
    return x, y, z


def _dump(what: str, data: dict[str, Any]) -> str:
    body = yaml.safe_dump(_plain(data), sort_keys=False, width=100, allow_unicode=True)
    return f"# Written by kgen: {what}. Do not edit.\n{body}"


def _plain(data: Any) -> Any:
    """Tuples as lists, which safe YAML can say."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, list | tuple) else data


def _load(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(), Loader=LOADER)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as problem:
        raise _damaged(path, problem) from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise _damaged(path, ValueError(f"schema is {found}, this kgen writes {SCHEMA}"))
    return data


def _damaged(path: Path, problem: Exception) -> RecordError:
    return RecordError(
        f"{path} is not what kgen wrote: {type(problem).__name__}: {problem}\n"
        "  restore it from version control, or delete it and tune again"
    )
