"""Emission: merge winners into a library's state, and write the library from the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.build import Compiler
from kgen.catalogue import Entry
from kgen.emit import python
from kgen.emit.common_files import list_file, package_files, shared_files
from kgen.emit.families import family_states, template_files
from kgen.emit.files import locked, remove, write_all
from kgen.emit.published import PACKAGE, no_library, operator_names, tuned
from kgen.emit.renewal import Renewal, StaleRow, renewed
from kgen.emit.row_states import gpu_state, row_state, safe_state
from kgen.emit.state import (
    TableState,
    read_safe,
    read_tables,
    safe_text,
    table_text,
)
from kgen.emit.stubs import stub_module
from kgen.emit.untuned import untuned_safe_kernels
from kgen.emit.unused_files import (
    old_headers,
    old_modules,
    old_templates,
    unreferenced_kernels,
)
from kgen.emit.values import SafeKernel, Winner
from kgen.model.gpu import GpuProfile
from kgen.model.rule_tree import LearntRule
from kgen.operators.base import Operator
from kgen.runtime.families import TEMPLATES
from kgen.runtime.integrity import digest_of_files, listed_files


@dataclass(frozen=True, slots=True)
class Emitted:
    """The result of an emission.

    Attributes:
        root: The output folder.
        operators: Operators in the library.
        changed: Files written because their content changed, relative to `root`.
        removed: Removed kernel files that no table names, and headers that no kernel includes.
        stale: Rows that could not be renewed.
        kept: Number of valid rows, after a renewal.
        compiled: Number of kernels that a renewal compiled.
    """

    root: Path
    operators: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    stale: tuple[StaleRow, ...] = ()
    kept: int = 0
    compiled: int = 0


def emit(
    out_dir: str | Path, winners: Sequence[Winner], safe: Sequence[SafeKernel],
    include_dir: str | Path, entry: Entry | None = None, *, is_whole: bool = True,
) -> Emitted:
    """Add winners and safe kernels to the library.

    The same values give the same bytes. Rows of other problems, GPUs and operators stay. Files are
    replaced by rename, kernels before the tables that name them. The folder is locked, so processes
    that emit into one folder run one after the other.

    Args:
        out_dir: The library's folder; created if missing.
        winners: Chosen configs, each with its verified record.
        safe: The safe kernels of the winners' operators, one per dtype combination.
        include_dir: Folder of the device headers; holds `kgen/`.
        entry: The winners' operator with its space and templates, from which its families are
            written; None: the families stay as they are.
        is_whole: Whether `safe` has every combination of its passes. If not, the library keeps its
            kernels for the other combinations; a call with a combination that has none is an error.
    Raises:
        StorageError: If a file cannot be written.
        RecordError: If the state in the folder is damaged, or a winner was never timed.
        SpaceError: If a guard cannot be checked by the generated library.
    """
    kernels: list[Winner | SafeKernel] = [*winners, *safe]
    operators = {kernel.operator.name: kernel.operator for kernel in kernels}
    return _write(Path(out_dir), operators, winners, safe, Path(include_dir),
                  entries=[] if entry is None else [entry], is_whole=is_whole)


def emit_rules(
    out_dir: str | Path, operator: Operator, gpu: GpuProfile, rules: Sequence[LearntRule],
    winners: Sequence[Winner], include_dir: str | Path, entry: Entry | None = None,
) -> Emitted:
    """Write learnt rules into the table of an operator on a GPU, with the rows that they need.

    Args:
        out_dir: The library's folder.
        operator: The operator.
        gpu: The GPU of the table.
        rules: They replace older ones for the same problems.
        winners: Rows that the table does not have yet.
        include_dir, entry: As in `emit`.
    Raises:
        CatalogueError: If the operator is not in a library in the folder.
        StorageError, RecordError: As in `emit`.
    """
    root = Path(out_dir)
    if not (root / PACKAGE / operator.name / "safe.yaml").exists():
        raise no_library(root, "--out")
    return _write(
        root, {operator.name: operator}, winners, (), Path(include_dir), {gpu.name: rules},
        entries=[] if entry is None else [entry],
    )


def rewrite(
    out_dir: str | Path, operator_named: Callable[[str], Operator], include_dir: str | Path
) -> Emitted:
    """Write a library again from its state, for instance after a merge of two.

    Args:
        out_dir: The library's folder.
        operator_named: Returns an operator of the library by name.
        include_dir: As in `emit`.
    Raises:
        CatalogueError: If there is no library in the folder.
        StorageError, RecordError: As in `emit`.
    """
    root = Path(out_dir)
    operators = {name: operator_named(name) for name in operator_names(root)}
    return _write(root, operators, (), (), Path(include_dir))


def renew(
    out_dir: str | Path, entry_named: Callable[[str], Entry], include_dir: str | Path,
    open_compiler: Callable[[Path], Compiler], added: Sequence[Entry] = (),
) -> Emitted:
    """Write a library again with the current templates; rows whose code changed are stale.

    Args:
        out_dir: The library's folder.
        entry_named: Returns an operator of the library, with its space and templates, by name.
        include_dir: As in `emit`.
        open_compiler: Opens NVRTC for a folder of headers; called if a kernel must be compiled.
        added: Operators to add to the library. An operator that was never tuned is added with its
            safe kernels and families; one that has been tuned is renewed like all others.
    Raises:
        CatalogueError: If there is no library in the folder.
        SpaceError: If an added operator has no safe variant of a pass.
        ToolchainError: If a kernel must be compiled and there is no NVRTC.
        StorageError, RecordError: As in `emit`.
    """
    root = Path(out_dir)
    new = [entry for entry in added
           if not read_tables(root / PACKAGE / entry.operator.name / "tables")]
    names = {entry.operator.name for entry in new}
    known = {name: entry_named(name) for name in operator_names(root) if name not in names}
    safe = [kernel for entry in new for kernel in untuned_safe_kernels(entry, Path(include_dir))]
    entries = [*known.values(), *new]

    def renewals(library: Path) -> dict[str, Renewal]:
        return {name: renewed(library, entry, Path(include_dir), open_compiler)
                for name, entry in known.items()}

    return _write(root, {entry.operator.name: entry.operator for entry in entries}, (), safe,
                  Path(include_dir), renewals=renewals, entries=entries)


def _write(
    root: Path, operators: Mapping[str, Operator], winners: Sequence[Winner],
    safe: Sequence[SafeKernel], include_dir: Path,
    rules: Mapping[str, Sequence[LearntRule]] | None = None,
    renewals: Callable[[Path], Mapping[str, Renewal]] | None = None,
    entries: Sequence[Entry] = (), is_whole: bool = True,
) -> Emitted:
    with locked(root):
        library = root / PACKAGE
        renewal = renewals(library) if renewals else {}
        kernels: dict[str, bytes] = {}
        modules: dict[str, bytes] = {}
        for name, operator in sorted(operators.items()):
            mine = [w for w in winners if w.operator.name == name]
            fallbacks = [s for s in safe if s.operator.name == name]
            kernels |= _kernel_files(name, mine, fallbacks)
            renewed_here = renewal.get(name)
            kernels |= {f"{PACKAGE}/{name}/kernels/{file}": content
                        for file, content in (renewed_here.files if renewed_here else {}).items()}
            modules |= _operator_files(library / name, operator, mine, fallbacks, rules or {},
                                       renewed_here, is_whole)
        files = {**shared_files(include_dir), **kernels, **modules}
        # The list of files is written with the tables, after the kernels: a process that is killed
        # before the end leaves a library that loads.
        changed = write_all(root, {**files, **list_file(root, files)})
        changed += write_all(root, package_files(root))
        removed = [path for name in operators for path in unreferenced_kernels(library / name)]
        if renewal:
            removed += old_headers(library, include_dir)
            removed += old_modules(library, {root / name for name in files})
        remove(removed)
        # Families are valid only for the current headers, so they are written after these.
        changed += write_all(root, _family_files(library, entries))
        if renewal:
            unused = old_templates(library)
            remove(unused)
            removed += unused
        changed += write_all(root, list_file(root, {}))
        return Emitted(root, tuple(sorted(tuned(library))), tuple(dict.fromkeys(changed)),
                       tuple(sorted(str(path.relative_to(root)) for path in removed)),
                       tuple(row for found in renewal.values() for row in found.stale),
                       sum(found.kept for found in renewal.values()),
                       sum(found.compiled for found in renewal.values()))


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
    rules: Mapping[str, Sequence[LearntRule]], renewal: Renewal | None, is_whole: bool,
) -> dict[str, bytes]:
    """The files of one operator; arguments as in `_write`, `rules` by GPU."""
    fields = [f.name for f in operator.signature.choices]
    tables = dict(renewal.tables) if renewal else {
        name: table.of_fields(fields) for name, table in read_tables(folder / "tables").items()
    }
    before = renewal.safe if renewal else read_safe(folder / "safe.yaml")
    for gpu in {w.gpu.name: w.gpu for w in winners}.values():
        state = gpu_state(gpu)
        table = tables.get(gpu.name, TableState(state, ()))
        tables[gpu.name] = table.with_rows(
            state, [row_state(w) for w in winners if w.gpu.name == gpu.name]
        )
    tables |= {name: tables[name].with_rules(found) for name, found in rules.items()}
    new = {(s.pass_name, tuple(s.dtypes.items())) for s in safe}
    replaced = {s.pass_name for s in safe} if is_whole else set()
    fallbacks = [s for s in before if s.pass_name not in replaced and [n for n, _ in s.dtypes]
                 == fields and (s.pass_name, s.dtypes) not in new]
    proven = {(s.pass_name, s.dtypes, s.kernel): s.code for s in before}
    fallbacks += [safe_state(s, proven) for s in safe]
    order = [p.name for p in operator.signature.passes]
    fallbacks.sort(key=lambda s: order.index(s.pass_name))  # stable
    emitted = {s.pass_name for s in fallbacks}
    emitted |= {row.pass_name for table in tables.values() for row in table.rows}
    texts = {
        "__init__.py": python.operator_module(operator, emitted),
        "__init__.pyi": stub_module(operator, emitted),
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


def _family_files(library: Path, entries: Iterable[Entry]) -> dict[str, bytes]:
    """The families of operators, determined by the library's rows, and their templates."""
    include = library / "_include"
    headers = digest_of_files((name, (include / name).read_bytes())
                              for name in listed_files(include))
    files: dict[str, bytes] = {}
    for entry in entries:
        operator = entry.operator
        families = family_states(entry, read_tables(library / operator.name / "tables").values())
        module = python.families_module(operator.name, operator.signature, families, headers)
        files[f"{PACKAGE}/{operator.name}/families.py"] = module.encode()
        files |= {f"{PACKAGE}/{TEMPLATES}/{name}": content
                  for name, content in template_files(entry, families).items()}
    return files
