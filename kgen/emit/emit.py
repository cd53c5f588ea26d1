"""Emission: merge winners into a library's state and write what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kgen
import kgen.runtime
from kgen.emit import python
from kgen.emit.binding import absent_literals, literals, plan_text
from kgen.emit.files import locked, remove, write_all
from kgen.emit.functions import function_name
from kgen.emit.state import (
    LEARNT,
    TUNED,
    GpuState,
    RowState,
    SafeState,
    TableState,
    read_safe,
    read_table,
    read_tables,
    safe_text,
    table_text,
)
from kgen.emit.values import SafeKernel, Winner
from kgen.errors import CatalogueError, RecordError
from kgen.model.gpu import GpuProfile
from kgen.model.rule_tree import LearntRule
from kgen.operators.base import Operator
from kgen.runtime.integrity import MANIFEST, listed_files, manifest_text

PACKAGE = "kgen_ops"
_RUNTIME_SUFFIXES = (".py", ".c")
_HEADER_SUFFIXES = (".cuh", ".hpp", ".cpp", ".h")


@dataclass(frozen=True, slots=True)
class Emitted:
    """What an emission did.

    Attributes:
        root: The output folder.
        operators: Operators that the library now has.
        changed: Files written because their content changed, relative to `root`.
        removed: Kernel files that no table names any more.
    """

    root: Path
    operators: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]


def emit(
    out_dir: str | Path, winners: Sequence[Winner], safe: Sequence[SafeKernel],
    include_dir: str | Path,
) -> Emitted:
    """Write winners and safe kernels into the library, beside what is there already.

    The same values give the same bytes. Rows of other problems, GPUs and operators stay. Files
    are replaced by rename, kernels before the tables that name them; two processes that emit into
    one folder take turns.

    Args:
        out_dir: The library's folder; created if missing.
        winners: Chosen configs, each with its verified record.
        safe: The safe kernels of each operator concerned, one per dtype combination.
        include_dir: Folder of the device headers; holds `kgen/`.
    Raises:
        StorageError: If a file cannot be written.
        RecordError: If the state in the folder is damaged, or a winner was never timed.
        SpaceError: If a guard cannot be checked by the generated library.
    """
    entries: list[Winner | SafeKernel] = [*winners, *safe]
    operators = {entry.operator.name: entry.operator for entry in entries}
    return _write(Path(out_dir), operators, winners, safe, Path(include_dir))


def emit_rules(
    out_dir: str | Path, operator: Operator, gpu: GpuProfile, rules: Sequence[LearntRule],
    winners: Sequence[Winner], include_dir: str | Path,
) -> Emitted:
    """Write learnt rules into the table of an operator on a GPU, with the rows that they need.

    Args:
        out_dir: The library's folder.
        operator: The operator.
        gpu: Of the table.
        rules: They take the place of older ones for the same problems.
        winners: Rows that the table does not have yet.
        include_dir: As of `emit`.
    Raises:
        CatalogueError: If the operator is not in a library in the folder.
        StorageError, RecordError: As `emit`.
    """
    root = Path(out_dir)
    if not (root / PACKAGE / operator.name / "safe.yaml").exists():
        raise no_library(root, "--out")
    return _write(
        root, {operator.name: operator}, winners, (), Path(include_dir), {gpu.name: rules}
    )


def renew(
    out_dir: str | Path, operator_named: Callable[[str], Operator], include_dir: str | Path
) -> Emitted:
    """Write a library again from its state: after a merge of two, or with a newer kgen.

    Args:
        out_dir: The library's folder.
        operator_named: Finds the operators that the library has.
        include_dir: As of `emit`.
    Raises:
        CatalogueError: If there is no library in the folder.
        StorageError, RecordError: As `emit`.
    """
    root = Path(out_dir)
    names = [path.parent.name for path in sorted((root / PACKAGE).glob("*/safe.yaml"))]
    if not names:
        raise no_library(root, "--out")
    return _write(root, {name: operator_named(name) for name in names}, (), (), Path(include_dir))


def published_table(out_dir: str | Path, operator: str, gpu: str) -> TableState:
    """Read the rows and rules of an operator on a GPU.

    Raises:
        CatalogueError: If it was not tuned there.
        RecordError: If the file is not what kgen wrote.
    """
    path = Path(out_dir) / PACKAGE / operator / "tables" / f"{gpu}.yaml"
    if not path.exists():
        raise CatalogueError(f"{operator} was not tuned for {gpu}: there is no {path}\n"
                             f"  run: kgen tune --op {operator} --gpu {gpu}")
    return read_table(path)


def no_library(root: Path, option: str) -> CatalogueError:
    """Return the error of a folder without a library, which `option` named."""
    return CatalogueError(f"there is no library in {root}: it has no {PACKAGE}/\n"
                          f"  kgen tune --out writes one; name its folder with {option}")


def _write(
    root: Path, operators: Mapping[str, Operator], winners: Sequence[Winner],
    safe: Sequence[SafeKernel], include_dir: Path,
    rules: Mapping[str, Sequence[LearntRule]] | None = None,
) -> Emitted:
    with locked(root):
        library = root / PACKAGE
        kernels: dict[str, bytes] = {}
        modules: dict[str, bytes] = {}
        for name, operator in sorted(operators.items()):
            mine = [w for w in winners if w.operator.name == name]
            fallbacks = [s for s in safe if s.operator.name == name]
            kernels |= _kernel_files(name, mine, fallbacks)
            modules |= _operator_files(library / name, operator, mine, fallbacks, rules or {})
        files = {**_shared_files(include_dir), **kernels, **modules}
        # The list goes along, behind what it names: a process that is killed between this and the
        # end leaves a library that loads.
        changed = write_all(root, {**files, **_list_file(root, files)})
        changed += write_all(root, _package_files(root))
        removed = [path for name in operators for path in _orphans(library / name)]
        remove(removed)
        changed += write_all(root, _list_file(root, {}))
        return Emitted(root, tuple(sorted(_tuned(library))), tuple(dict.fromkeys(changed)),
                       tuple(sorted(str(path.relative_to(root)) for path in removed)))


def _kernel_files(
    name: str, winners: Iterable[Winner], safe: Iterable[SafeKernel]
) -> dict[str, bytes]:
    folder = f"{PACKAGE}/{name}/kernels"
    files: dict[str, bytes] = {}
    entries: list[Winner | SafeKernel] = [*winners, *safe]
    for entry in entries:
        files[f"{folder}/{entry.rendered.digest}.cu"] = entry.rendered.source.encode()
    for winner in winners:
        if winner.cubin is not None:
            files[f"{folder}/{winner.rendered.digest}.{winner.arch}.cubin"] = winner.cubin
    return files


def _operator_files(
    folder: Path, operator: Operator, winners: Sequence[Winner], safe: Sequence[SafeKernel],
    rules: Mapping[str, Sequence[LearntRule]],
) -> dict[str, bytes]:
    """Args as of `_write`, of one operator; `rules` by GPU."""
    fields = [f.name for f in operator.signature.choices]
    tables = {
        name: table.of_fields(fields) for name, table in read_tables(folder / "tables").items()
    }
    for gpu in {w.gpu.name: w.gpu for w in winners}.values():
        state = _gpu_state(gpu)
        table = tables.get(gpu.name, TableState(state, ()))
        tables[gpu.name] = table.with_rows(
            state, [_row_state(w) for w in winners if w.gpu.name == gpu.name]
        )
    tables |= {name: tables[name].with_rules(found) for name, found in rules.items()}
    renewed = {s.pass_name for s in safe}
    fallbacks = [s for s in read_safe(folder / "safe.yaml") if s.pass_name not in renewed]
    fallbacks += [_safe_state(s) for s in safe]
    order = [p.name for p in operator.signature.passes]
    fallbacks.sort(key=lambda s: order.index(s.pass_name))  # stable: dtypes as declared
    emitted = {s.pass_name for s in fallbacks}
    emitted |= {row.pass_name for table in tables.values() for row in table.rows}
    texts = {
        "__init__.py": python.operator_module(operator, emitted),
        "safe.py": python.safe_module(operator.name, operator.signature, fallbacks),
        "safe.yaml": safe_text(fallbacks),
        "tables/__init__.py": python.tables_module(
            operator.name, [tables[name].gpu for name in sorted(tables)]
        ),
    }
    for gpu_name, table in sorted(tables.items()):
        texts[f"tables/{gpu_name}.yaml"] = table_text(table)
        texts[f"tables/{gpu_name}.py"] = python.table_module(
            operator.name, operator.signature, table
        )
    return {f"{PACKAGE}/{operator.name}/{path}": text.encode() for path, text in texts.items()}


def _gpu_state(gpu: GpuProfile) -> GpuState:
    return GpuState(gpu.name, gpu.title, gpu.device_names, gpu.arch, tuple(gpu.names.items()))


def _row_state(winner: Winner) -> RowState:
    passed = winner.operator.signature.pass_named(winner.pass_name)
    timing = winner.record.timing
    if timing is None:
        raise RecordError(
            f"{winner.operator.name} {winner.problem}: record {winner.record.id} "
            f"({winner.record.fate}) has no timing, so its config cannot be a winner"
        )
    constants = {name: winner.problem.dim(name) for name in winner.variant.constants}
    dtypes = dict(winner.problem.dtypes)
    config = winner.variant.values(winner.config)
    fixed = literals(constants, dtypes, config, winner.gpu.names)
    fixed |= absent_literals(passed, dtypes)
    return RowState(
        pass_name=winner.pass_name,
        dims=winner.problem.dims,
        dtypes=winner.problem.dtypes,
        variant=winner.config.variant,
        config=winner.config.values,
        constants=winner.variant.constants,
        kernel=winner.rendered.digest,
        record=winner.record.id,
        median_us=round(timing.median_us, 3),
        plan=plan_text(winner.variant, passed, fixed),
        origin=TUNED if winner.searched else LEARNT,
    )


def _safe_state(safe: SafeKernel) -> SafeState:
    passed = safe.operator.signature.pass_named(safe.pass_name)
    fixed = literals({}, safe.dtypes, safe.variant.values(safe.config), {})
    fixed |= absent_literals(passed, safe.dtypes)
    plan = plan_text(safe.variant, passed, fixed)
    return SafeState(
        pass_name=safe.pass_name,
        dtypes=tuple(safe.dtypes.items()),
        variant=safe.config.variant,
        config=safe.config.values,
        kernel=safe.rendered.digest,
        # What is right for every problem has no conditions.
        plan=type(plan)(plan.launches, plan.workspaces),
    )


def _shared_files(include_dir: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {f"{PACKAGE}/py.typed": b""}
    # By its path: importing the adapters would import torch, which an emission does without.
    compat = Path(kgen.__path__[0]) / "compat"
    for folder, name in ((Path(kgen.runtime.__path__[0]), "_runtime"), (compat, "compat")):
        for path in sorted(folder.iterdir()):
            if path.suffix in _RUNTIME_SUFFIXES:
                files[f"{PACKAGE}/{name}/{path.name}"] = path.read_bytes()
    for path in sorted(include_dir.rglob("*")):
        if path.suffix in _HEADER_SUFFIXES:
            files[f"{PACKAGE}/_include/{path.relative_to(include_dir)}"] = path.read_bytes()
    return files


def _list_file(root: Path, coming: Mapping[str, bytes]) -> dict[str, bytes]:
    """The list of what lies in the library now, and of files that are about to be written."""
    library = root / PACKAGE
    files = {name: (library / name).read_bytes() for name in listed_files(library)
             if f"{PACKAGE}/{name}" not in coming}
    files |= {name.removeprefix(f"{PACKAGE}/"): data for name, data in coming.items()}
    return {f"{PACKAGE}/{MANIFEST}": manifest_text(files).encode()}


def _package_files(root: Path) -> dict[str, bytes]:
    tuned = _tuned(root / PACKAGE)
    functions = {
        name: [function_name(name, pass_name) for pass_name in passes]
        for name, (passes, _) in tuned.items()
    }
    gpus = {name: tables for name, (_, tables) in tuned.items()}
    files = python.project_files(gpus, _example(root / PACKAGE, sorted(tuned)))
    files[f"{PACKAGE}/__init__.py"] = python.package_module(functions)
    files[f"{PACKAGE}/selftest.py"] = python.selftest_module()
    return {path: text.encode() for path, text in files.items()}


def _tuned(library: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Operators in a library: (passes, GPUs) by name, as their state files say."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for path in sorted(library.glob("*/safe.yaml")):
        tables = read_tables(path.parent / "tables")
        passes = dict.fromkeys(s.pass_name for s in read_safe(path))
        passes |= dict.fromkeys(row.pass_name for t in tables.values() for row in t.rows)
        found[path.parent.name] = (
            sorted(passes, key=lambda name: (name != "forward", name)), list(tables)
        )
    return found


def _example(library: Path, operators: Sequence[str]) -> str:
    """Arguments for `explain` in the README: the first measured row."""
    for name in operators:
        for table in read_tables(library / name / "tables").values():
            for row in table.rows:
                dims = ", ".join(f"{dim}={extent}" for dim, extent in row.dims)
                dtypes = ", ".join(f'{field}="{dtype}"' for field, dtype in row.dtypes)
                return f'"{name}", {dims}, {dtypes}'
    return '"<operator>", ...'


def _orphans(folder: Path) -> list[Path]:
    """Kernel files of an operator that neither a table nor the safe rows name."""
    named = {row.kernel for table in read_tables(folder / "tables").values() for row in table.rows}
    named |= {row.kernel for row in read_safe(folder / "safe.yaml")}
    return sorted(
        path for path in (folder / "kernels").glob("*")
        if path.suffix in (".cu", ".cubin") and path.name.partition(".")[0] not in named
    )
