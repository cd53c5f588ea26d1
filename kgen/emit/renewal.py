"""Renew the rows of a library: render their kernels again from the current templates.

A row was verified and timed as machine code with a launch plan. If the kernel still compiles to
the same code and the plan is the same, the row stays valid even if names and comments changed: it
gets the current text and keeps its record. If the code or the plan changed, the row is stale: it
keeps the verified text and cubin, and the result lists it with the command that tunes it again. A
row is dropped only if its kernel cannot be rendered because its variant or a parameter no longer
exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kgen.build import Compiler
from kgen.build.render import Renderer
from kgen.catalogue import Entry
from kgen.emit.binding import BoundPlan, absent_literals, bound_plan, literals
from kgen.emit.plan_values import first_difference, plan_values
from kgen.emit.renewal_builds import CurrentRow, RenewalBuilds
from kgen.emit.state import (
    LEARNT,
    PREDICTED,
    GpuState,
    RowState,
    SafeState,
    TableState,
    read_safe,
    read_tables,
)
from kgen.errors import KgenError
from kgen.model.artifact import BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.digest import digest_of_text
from kgen.model.problem import Problem, with_dims
from kgen.model.space import Variant
from kgen.runtime.code_digest import Code, CubinError, code_of
from kgen.search.declared import as_declared

HOST = "host"
# Plans of safe kernels are compared at these extents: small and large, even and odd.
_SAMPLES = (1, 67, 4096)


@dataclass(frozen=True, slots=True)
class StaleRow:
    """A row whose kernel or plan has changed, or whose kernel cannot be rendered any more.

    Attributes:
        where: Operator, pass and GPU, or `safe kernel`.
        problem: The row's problem; for a safe kernel, its dtypes.
        config: The config's label.
        record: Identity of its record; empty for a safe kernel.
        was: Digest of the verified code.
        now: Digest of the code to which the current text compiles; empty if it does not.
        why: The reason, in one sentence.
        command: The command that makes the row valid again.
        is_dropped: Whether it was removed from the table.
    """

    where: str
    problem: str
    config: str
    record: str
    was: str
    now: str
    why: str
    command: str
    is_dropped: bool = False

    def __str__(self) -> str:
        record = f", record {self.record}" if self.record else ""
        code = f"\n  code: proven {self.was or 'unknown'}, today {self.now or 'none'}"
        return (f"{'dropped' if self.is_dropped else 'stale':<8} {self.where} {self.problem}\n"
                f"  {self.config}{record}\n  {self.why}{code}\n  next: {self.command}")


@dataclass(frozen=True)
class Renewal:
    """The renewed rows of an operator.

    Attributes:
        tables: The tables by GPU.
        safe: The safe kernels.
        files: New texts and cubins of `kernels/`, by name.
        stale: Rows that could not be renewed.
        kept: Number of valid rows.
        compiled: Number of kernels whose text had changed.
    """

    tables: Mapping[str, TableState]
    safe: tuple[SafeState, ...]
    files: Mapping[str, bytes]
    stale: tuple[StaleRow, ...]
    kept: int
    compiled: int


def renewed(
    library: Path, entry: Entry, include_dir: Path, open_compiler: Callable[[Path], Compiler]
) -> Renewal:
    """Render the kernels of an operator again, compile changed ones, and compare the code.

    Args:
        library: The package's folder, with the library as it was last written.
        entry: The operator with its current space and templates.
        include_dir: The current headers.
        open_compiler: Opens NVRTC for a folder of headers.
    Raises:
        ToolchainError: If a kernel must be compiled and there is no NVRTC.
        RecordError: If a state file is damaged.
    """
    return _Operator(library, entry, include_dir, open_compiler).renewal()


class _Operator:
    """The renewal of one operator."""

    def __init__(
        self, library: Path, entry: Entry, include_dir: Path,
        open_compiler: Callable[[Path], Compiler],
    ) -> None:
        self._entry, self._operator = entry, entry.operator
        folder = library / self._operator.name
        self._kernels = folder / "kernels"
        self._renderer = Renderer(include_dir)
        self._builds = RenewalBuilds(library, include_dir, open_compiler)
        fields = [f.name for f in self._operator.signature.choices]
        self._tables = {
            name: t.of_fields(fields) for name, t in read_tables(folder / "tables").items()
        }
        self._safe = read_safe(folder / "safe.yaml")
        self._files: dict[str, bytes] = {}
        self._stale: list[StaleRow] = []
        self._kept = 0

    def renewal(self) -> Renewal:
        """Collect all builds, run them, and renew every row."""
        rows = [(table.gpu, row, self._current_row(table.gpu, row))
                for table in self._tables.values() for row in table.rows]
        safe = [(row, self._current_safe(row)) for row in self._safe]
        for gpu, row, today in rows:
            self._ask(gpu.arch, row.kernel, row.code, today, self._is_lost(row.kernel, gpu.arch))
        for kernel, found in safe:
            for arch, code in self._codes_wanted(kernel):
                self._ask(arch, kernel.kernel, code, found)
        self._builds.run()
        renewed_rows: dict[str, list[RowState]] = {name: [] for name in self._tables}
        for gpu, row, today in rows:
            renewed_rows[gpu.name] += self._renewed(gpu, row, today)
        return Renewal(
            {name: table.with_renewed(renewed_rows[name]) for name, table in self._tables.items()},
            tuple(kept for row, found in safe for kept in self._renewed_safe(row, found)),
            self._files, tuple(self._stale), self._kept, len(self._builds.today),
        )

    # Rendering

    def _current_row(self, gpu: GpuState, row: RowState) -> CurrentRow | str:
        """A row rendered from the current sources, or the reason why it cannot be rendered."""
        config = as_declared(self._entry, row.pass_name, Config(row.variant, row.config))
        if config is None:
            return self._no_config(row)
        variant = self._entry.space.variant(row.pass_name, row.variant)
        return self._rendered(variant, config, Problem(row.dims, row.dtypes), dict(gpu.facts))

    def _current_safe(self, row: SafeState) -> CurrentRow | str:
        try:
            variant = self._entry.space.safe_variant(row.pass_name)
        except KgenError as refusal:
            return str(refusal)
        assert variant.safe is not None
        signature = self._operator.signature
        dims = tuple((d.name, max(_SAMPLES[1], d.smallest)) for d in signature.dims)
        problem = with_dims(Problem(dims, row.dtypes), {}, signature)
        return self._rendered(variant, variant.safe, problem, {})

    def _rendered(
        self, variant: Variant, config: Config, problem: Problem, facts: Mapping[str, int]
    ) -> CurrentRow | str:
        passed = self._operator.signature.pass_named(variant.pass_name)
        constants = {name: problem.dim(name) for name in variant.constants}
        dtypes = dict(problem.dtypes)
        fixed = literals(constants, dtypes, variant.values(config), facts)
        fixed |= absent_literals(passed, dtypes)
        try:
            rendered = self._renderer.render(
                self._operator.name, self._entry.templates, variant, config, problem)
            return CurrentRow(rendered, variant, config, bound_plan(variant, passed, fixed))
        except KgenError as found:
            return f"it does not render: {found}"

    def _no_config(self, row: RowState) -> str:
        known = [v.name for v in self._entry.space.of_pass(row.pass_name)]
        if row.variant not in known:
            return f"{self._entry.space.path} has no variant '{row.variant}' any more"
        return f"variant '{row.variant}' of {self._entry.space.path} has no such config any more"

    # Building

    def _is_lost(self, kernel: str, arch: str) -> bool:
        """Whether the cubin of a row is missing; GPUs' rows have one, safe kernels have none."""
        return arch != HOST and not (self._kernels / f"{kernel}.{arch}.cubin").exists()

    def _ask(
        self, arch: str, kernel: str, code: str, today: CurrentRow | str, is_lost: bool = False
    ) -> None:
        """Request the builds that a row needs.

        These are the row's current text if it changed or its cubin is lost, and the verified text
        if its code digest is unknown.
        """
        if isinstance(today, str) or arch == HOST:
            return
        cubin = self._kernels / f"{kernel}.{arch}.cubin"
        is_same_text = today.rendered.digest == kernel
        is_as_shipped = not cubin.exists() or self._shipped(cubin) in ("", code)
        if is_same_text and is_as_shipped and not is_lost:
            return
        if is_lost or not (is_same_text and not code):
            self._builds.today[today.rendered.digest, arch] = today.rendered
        if not code and not cubin.exists():
            self._builds.earlier[kernel, arch] = self._earlier(kernel)

    def _earlier(self, kernel: str) -> Rendered:
        """A text of the library, with a digest that distinguishes its headers from the current."""
        text = (self._kernels / f"{kernel}.cu").read_text(encoding="utf-8")
        include = self._builds.library / "_include"
        headers = [part for path in sorted(include.rglob("*")) if path.is_file()
                   for part in (str(path.relative_to(include)), path.read_text("utf-8"))]
        return Rendered(f"{self._operator.name}/{kernel}", text, digest_of_text(text, *headers))

    def _shipped(self, cubin: Path) -> str:
        """Digest of a shipped cubin; empty if the file is no cubin (in tests)."""
        try:
            return code_of(cubin.read_bytes()).digest
        except (OSError, CubinError):
            return ""

    def _proven(self, arch: str, kernel: str, code: str) -> tuple[str, Mapping[str, str]]:
        """Digest of the verified code, and the digests of its functions if they are known."""
        try:
            found = code_of((self._kernels / f"{kernel}.{arch}.cubin").read_bytes())
        except (OSError, CubinError):
            made = None
            if (kernel, arch) in self._builds.earlier:
                made = self._builds.code(kernel, arch)
            if not isinstance(made, Code):
                return code, {}
            found = made
        return code or found.digest, found.functions if code in ("", found.digest) else {}

    # Renewing

    def _renewed(
        self, gpu: GpuState, row: RowState, today: CurrentRow | str
    ) -> Iterator[RowState]:
        """Yield the renewed row unless it is dropped; record it if it is stale."""
        problem = ",".join(f"{n}={v}" for n, v in (*row.dims, *row.dtypes))
        verb = {LEARNT: "learn", PREDICTED: "predict"}.get(row.origin, "tune")
        stale = StaleRow(
            f"{self._operator.name} {row.pass_name} {gpu.name}", problem,
            Config(row.variant, row.config).label, row.record, row.code, "", "",
            f"kgen {verb} --op {self._operator.name} --pass {row.pass_name} --gpu {gpu.name} "
            f"--problem {problem}",
        )
        if isinstance(today, str):
            self._stale.append(replace(stale, why=today, is_dropped=True))
            return
        was, now, why = self._compared(
            gpu.arch, row.kernel, row.code, row.plan, today, [dict(row.dims)])
        if why:
            self._stale.append(replace(stale, was=was, now=now, why=why))
            yield replace(row, code=was)
            return
        self._kept += 1
        self._take(today, row.kernel, gpu.arch)
        yield replace(
            row, code=now, variant=today.config.variant, config=today.config.values,
            constants=today.variant.constants, kernel=today.rendered.digest, plan=today.plan,
        )

    def _renewed_safe(self, row: SafeState, today: CurrentRow | str) -> Iterator[SafeState]:
        """As `_renewed`, for a safe kernel."""
        stale = StaleRow(
            f"{self._operator.name} {row.pass_name} safe kernel",
            ",".join(f"{n}={v}" for n, v in row.dtypes), Config(row.variant, row.config).label,
            "", "", "", "",
            f"kgen tune --op {self._operator.name} --pass {row.pass_name} --gpu auto",
        )
        if isinstance(today, str):
            self._stale.append(replace(stale, why=today, is_dropped=True))
            return
        codes: dict[str, str] = {}
        faults: list[StaleRow] = []
        for arch, code in self._codes_wanted(row):
            was, now, why = self._compared(
                arch, row.kernel, code, row.plan, today, list(self._samples()))
            codes[arch] = was if why else now
            if why:
                faults.append(replace(
                    stale, where=f"{stale.where}, {arch}", was=was, now=now, why=why))
        self._stale += faults
        proven = tuple((arch, code) for arch, code in sorted(codes.items()) if code)
        if faults:
            yield replace(row, code=proven)
            return
        self._kept += 1
        self._take(today, row.kernel, "")
        yield replace(
            row, code=proven, variant=today.config.variant, config=today.config.values,
            kernel=today.rendered.digest,
            plan=BoundPlan(today.plan.launches, today.plan.workspaces),
        )

    def _compared(
        self, arch: str, kernel: str, code: str, plan: BoundPlan, today: CurrentRow,
        samples: Sequence[Mapping[str, int]],
    ) -> tuple[str, str, str]:
        """Return the verified code, the current code, and why the row is stale.

        The reason is empty if the row is valid.
        """
        was, was_functions = self._proven(arch, kernel, code)
        functions: Mapping[str, str] = {}
        if arch == HOST:
            now = today.rendered.bare
            was = was or (now if today.rendered.digest == kernel else "")
        elif (today.rendered.digest, arch) in self._builds.today:
            made = self._builds.code(today.rendered.digest, arch)
            if isinstance(made, BuildFailure):
                return was, "", f"it does not compile any more: {made.message.splitlines()[0]}"
            now, functions = made.digest, made.functions
        else:
            now, functions = was, was_functions
        if now != was:
            return was, now, "its code changed, or another compiler made it"
        known = functions if was_functions else {}
        before = [plan_values(plan, sample, was_functions if known else {}) for sample in samples]
        after = [plan_values(today.plan, sample, known) for sample in samples]
        if before != after:
            return was, now, f"its launch plan changed: {first_difference(before, after)}"
        return was, now, ""

    def _codes_wanted(self, row: SafeState) -> list[tuple[str, str]]:
        """Architectures for which to compare a safe kernel, with the verified code of each.

        These are the recorded architectures; if there are none, those of the tuned GPUs.
        """
        arches = dict.fromkeys(table.gpu.arch for table in self._tables.values())
        return list(row.code or ((arch, "") for arch in arches))

    def _samples(self) -> Iterator[dict[str, int]]:
        """Extents and hardware facts at which plans of safe kernels are compared."""
        dims = self._operator.signature.dims
        facts = [dict(table.gpu.facts) for table in self._tables.values()] or [{}]
        for of_gpu in facts:
            for extent in _SAMPLES:
                yield of_gpu | {dim.name: max(extent, dim.smallest) for dim in dims}

    def _take(self, today: CurrentRow, kernel: str, arch: str) -> None:
        """Take over the current text that the library lacks, and a row's cubin if it was compiled.

        Args:
            today: The current text.
            kernel: The text that the row had before.
            arch: The row's architecture; empty for a safe kernel, which has no cubin.
        """
        digest = today.rendered.digest
        if digest != kernel or not (self._kernels / f"{digest}.cu").exists():
            self._files[f"{digest}.cu"] = today.rendered.source.encode()
        if arch and (digest, arch) in self._builds.today:
            self._files[f"{digest}.{arch}.cubin"] = self._builds.image(digest, arch)
