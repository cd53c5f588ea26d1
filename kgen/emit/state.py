"""The state of a library as data: `tables/<gpu>.yaml` and `safe.yaml` of each operator.

The Python tables are generated from these files. A tune of one problem on one GPU therefore adds to
the results of earlier tunes, and the tunes of two people merge as text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kgen.catalogue.yaml_tree import LOADER, refuse_traps
from kgen.emit.binding import BoundLaunch, BoundPlan, BoundWorkspace
from kgen.emit.untrusted import require_plain_data
from kgen.errors import RecordError
from kgen.model.config import Value
from kgen.model.rule_tree import Leaf, LearntRule, RuleTree, Split

SCHEMA = 1
TUNED = "tuned"  # found by a search
LEARNT = "learnt"  # measured while a rule was learnt, among few configs
PREDICTED = "predicted"  # chosen by a model; verified only on the CPU, and never timed

_State = TypeVar("_State")
_READ: dict[Path, tuple[bytes, Any]] = {}  # file -> (digest of its content, its state)


@dataclass(frozen=True, slots=True)
class RowState:
    """A problem with its winner; the fields are those of the generated `Row`.

    `origin` says how the winner was found: `tuned`, `learnt` or `predicted`. A predicted row has
    been verified only on the CPU, and its `median_us` is the model's estimate.

    `code` is the digest of the machine code that was verified and measured
    (`kgen.runtime.code_digest`; for the host, a digest of the text without comments). It is empty
    in libraries older than the digest until `kgen emit` adds it.
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
    plan: BoundPlan
    origin: str = TUNED
    code: str = ""

    @property
    def problem(self) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
        """The key of a row, also for sorting; a later tune of the same problem replaces the row."""
        return (self.pass_name, tuple(v for _, v in self.dtypes), tuple(v for _, v in self.dims))

    @property
    def is_measured(self) -> bool:
        """Whether its kernel ran on its GPU."""
        return self.origin != PREDICTED


@dataclass(frozen=True, slots=True)
class SafeState:
    """The safe kernel of one pass and dtype combination.

    `code` holds the digest of its machine code for each architecture on which it was certified.
    """

    pass_name: str
    dtypes: tuple[tuple[str, str], ...]
    variant: str
    config: tuple[tuple[str, Value], ...]
    kernel: str
    plan: BoundPlan
    code: tuple[tuple[str, str], ...] = ()


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

        A predicted row never replaces a measured one.
        """
        merged = {row.problem: row for row in self.rows}
        for row in rows:
            known = merged.get(row.problem)
            if row.is_measured or known is None or not known.is_measured:
                merged[row.problem] = row
        table = replace(self, gpu=gpu, rows=tuple(merged[key] for key in sorted(merged)))
        return table._with_rules(self.rules)

    def with_renewed(self, rows: Iterable[RowState]) -> TableState:
        """Replace all rows by their renewed forms; drop rules that name a dropped row."""
        return replace(self, rows=tuple(rows))._with_rules(self.rules)

    def with_rules(self, rules: Iterable[LearntRule]) -> TableState:
        """Add rules and replace those of the same problems; drop rows that only these named."""
        merged = {rule.covers: rule for rule in (*self.rules, *rules)}
        before = {record for rule in self.rules for record in rule.records}
        named = {record for rule in merged.values() for record in rule.records}
        kept = [row for row in self.rows
                if row.origin == TUNED or row.record in named or row.record not in before]
        table = replace(self, rows=tuple(kept))
        return table._with_rules(merged[key] for key in sorted(merged))

    def _with_rules(self, rules: Iterable[LearntRule]) -> TableState:
        """The table with these rules, without rules that name a missing row."""
        known = {row.record for row in self.rows}
        return replace(self, rules=tuple(rule for rule in rules if rule.records <= known))

    def of_fields(self, dtype_fields: Sequence[str]) -> TableState:
        """Drop rows with other dtype fields than the operator's current ones; no call matches them.
        """
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
        RecordError: If a file does not have the format that kgen writes.
    """
    return {path.stem: read_table(path) for path in sorted(folder.glob("*.yaml"))}


def read_table(path: Path) -> TableState:
    """Read one table; see `read_tables`."""
    return _read_once(path, _table)


def read_safe(path: Path) -> tuple[SafeState, ...]:
    """Read `safe.yaml`; empty if there is none.

    Raises:
        RecordError: If the file does not have the format that kgen writes.
    """
    return _read_once(path, _safe) if path.exists() else ()


def _table(data: dict[str, Any]) -> TableState:
    gpu = data["gpu"]
    return TableState(
        GpuState(gpu["name"], gpu["title"], tuple(gpu["device_names"]), gpu["arch"],
                 tuple(gpu["facts"].items())),
        tuple(
            RowState(constants=tuple(row["constants"]), record=row["record"],
                     median_us=float(row["median_us"]), dims=tuple(row["dims"].items()),
                     origin=row.get("origin", TUNED), code=row.get("code", ""),
                     **_common(row))
            for row in data["rows"]
        ),
        tuple(_read_rule(rule) for rule in data.get("rules", ())),
    )


def _safe(data: dict[str, Any]) -> tuple[SafeState, ...]:
    return tuple(SafeState(code=tuple(row.get("code", {}).items()), **_common(row))
                 for row in data["rows"])


def _read_once(path: Path, state_of: Callable[[dict[str, Any]], _State]) -> _State:
    """Read a state file; content that this process has already parsed is not parsed again.

    A tune of many problems publishes after each of them, and parsing the files of all operators
    takes up to 17 s.
    """
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise _damaged(path, problem) from None
    digest = hashlib.sha256(content).digest()
    known = _READ.get(path)
    if known is not None and known[0] == digest:
        state: _State = known[1]
        return state
    try:
        state = state_of(_load(path, content))
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise _damaged(path, problem) from None
    _READ[path] = digest, state
    return state


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
    if row.code:
        data["code"] = row.code if isinstance(row.code, str) else dict(row.code)
    if isinstance(row, RowState):
        data |= {"constants": list(row.constants), "record": row.record,
                 "median_us": row.median_us}
        if row.origin != TUNED:
            data["origin"] = row.origin
    return {**data, "plan": plan}


def _launch(launch: BoundLaunch) -> dict[str, Any]:
    data = {**asdict(launch), "grid": list(launch.grid), "block": list(launch.block),
            "args": list(launch.args)}
    for key in ("pdl", "coresident"):  # left out where false
        if not data[key]:
            del data[key]
    return data


def _rule(rule: LearntRule) -> dict[str, Any]:
    return {"pass": rule.pass_name, "dtypes": dict(rule.dtypes), "constants": dict(rule.constants),
            "extents": {name: [least, largest] for name, least, largest in rule.extents},
            "problems": rule.problems, "mean_loss": rule.mean_loss, "worst_loss": rule.worst_loss,
            "tree": _tree(rule.tree)}


def _tree(tree: RuleTree) -> dict[str, Any]:
    if isinstance(tree, Leaf):
        return {"rows": list(tree.rows)}
    return {"product_of": list(tree.dims), "at_most": tree.at_most,
            "below": _tree(tree.below), "above": _tree(tree.above)}


def _read_rule(rule: dict[str, Any]) -> LearntRule:
    return LearntRule(
        rule["pass"], tuple(rule["dtypes"].items()), tuple(rule["constants"].items()),
        _read_tree(rule["tree"]), int(rule["problems"]), float(rule["mean_loss"]),
        float(rule["worst_loss"]),
        tuple((name, int(least), int(largest))
              for name, (least, largest) in rule.get("extents", {}).items()),
    )


def _read_tree(tree: dict[str, Any]) -> RuleTree:
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
        "plan": BoundPlan(
            tuple(
                BoundLaunch(launch["kernel"], _three(launch["grid"]), _three(launch["block"]),
                           launch["smem"], tuple(launch["args"]), launch["kinds"],
                           # tables written before `pdl` say `overlaps` or `early`
                           any(launch.get(key) for key in ("pdl", "overlaps", "early")),
                           bool(launch.get("coresident")))
                for launch in plan["launches"]
            ),
            tuple(BoundWorkspace(**workspace) for workspace in plan["workspaces"]),
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
    """Tuples as lists, because safe YAML has no tuples."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, list | tuple) else data


def _load(path: Path, content: bytes) -> dict[str, Any]:
    try:
        text = content.decode()
        refuse_traps(text, str(path), RecordError)
        data = yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as problem:
        raise _damaged(path, problem) from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise _damaged(path, ValueError(f"schema is {found}, this kgen writes {SCHEMA}"))
    try:
        require_plain_data(path, data)
    except (TypeError, ValueError, AttributeError) as problem:
        raise _damaged(path, problem) from None
    return data


def _damaged(path: Path, problem: Exception) -> RecordError:
    return RecordError(
        f"{path} does not have the format that kgen writes: {type(problem).__name__}: {problem}\n"
        "  restore it from version control, or delete it and tune again"
    )
