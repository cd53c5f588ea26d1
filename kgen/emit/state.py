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

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RowState:
    """A measured problem with its winner; the fields are those of the generated `Row`."""

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
    """All rows of one operator on one GPU, sorted."""

    gpu: GpuState
    rows: tuple[RowState, ...]

    def with_rows(self, gpu: GpuState, rows: Iterable[RowState]) -> TableState:
        """Add rows; those of the same problem are replaced."""
        merged = {row.problem: row for row in (*self.rows, *rows)}
        return replace(self, gpu=gpu, rows=tuple(merged[key] for key in sorted(merged)))

    def of_fields(self, dtype_fields: Sequence[str]) -> TableState:
        """Drop rows from before the operator got its present dtype fields: no call finds them."""
        wanted = list(dtype_fields)
        return replace(
            self, rows=tuple(row for row in self.rows if [n for n, _ in row.dtypes] == wanted)
        )


def table_text(table: TableState) -> str:
    """Return the YAML of a table."""
    return _dump("what the table of this GPU is generated from", {
        "schema": SCHEMA,
        "gpu": {**asdict(table.gpu), "facts": dict(table.gpu.facts)},
        "rows": [_row(row) for row in table.rows],
    })


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
                         **_common(row))
                for row in data["rows"]
            ),
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
            {**asdict(launch), "grid": list(launch.grid), "block": list(launch.block),
             "args": list(launch.args)}
            for launch in row.plan.launches
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
    return {**data, "plan": plan}


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
                           launch["smem"], tuple(launch["args"]), launch["kinds"])
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
