"""`kgen emit` keeps a row whose machine code and launch plan are the same, and lists the others.

The library has one operator, as `kgen new-op` writes it, with a row of an H200.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import Entry, open_catalogue, profile_named
from kgen.emit import Emitted, SafeKernel, Winner, emit, renew
from kgen.emit.state import RowState, read_safe, read_table
from kgen.model.config import Config
from kgen.model.problem import Problem, parse_problem, with_dims
from kgen.model.record import Fate, Record, Timing
from kgen.runtime import nvrtc
from kgen.runtime.code_digest import code_of
from kgen.scaffold import write_operator

pytestmark = pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")

NAME = "toy"
CONFIG = Config.of("vectors", {"threads": 128, "vec": 4})
PROBLEM = "M=64,N=256,dtype=bf16"
LAUNCH = f"kernel: {NAME}_forward\n          grid: blocks\n          block: threads\n"


def entry_of(folder: Path) -> Entry:
    return open_catalogue([folder]).entry(NAME)


def winner_of(entry: Entry, gpu_name: str) -> Winner:
    """A row of the vectorised variant; on the GPU with its cubin."""
    gpu = profile_named(gpu_name)
    problem = parse_problem(PROBLEM, entry.operator.signature)
    variant = entry.space.variant("forward", CONFIG.variant)
    rendered = Renderer(include_dir()).render(NAME, entry.templates, variant, CONFIG, problem)
    cubin = None
    if not gpu.is_host:
        folders = [str(include_dir())]
        cubin, _ = nvrtc.compile_cubin(rendered.source, "toy.cu", gpu.arch, folders)
    record = Record(
        key=problem.digest, operator=NAME, pass_name="forward", problem=str(problem), gpu=gpu.name,
        config=CONFIG, fate=Fate.VERIFIED, timing=Timing(10.0, 9.0, 11.0, 50, "test"),
        when="2026-01-01T00:00:00Z",
    )  # fmt: skip
    return Winner(entry.operator, "forward", problem, gpu, variant, CONFIG, rendered, cubin,
                  gpu.arch, record)  # fmt: skip


def safe_kernels_of(entry: Entry) -> list[SafeKernel]:
    operator, renderer, made = entry.operator, Renderer(include_dir()), []
    for pass_ in operator.signature.passes:
        variant = entry.space.safe_variant(pass_.name)
        assert variant.safe is not None
        for dtypes in operator.signature.dtype_combinations():
            extents = tuple((d.name, 64) for d in operator.signature.dims)
            problem = with_dims(Problem(extents, tuple(dtypes.items())), {}, operator.signature)
            rendered = renderer.render(NAME, entry.templates, variant, variant.safe, problem)
            made.append(SafeKernel(operator, pass_.name, dtypes, variant, variant.safe, rendered))
    return made


class Library:
    """The operator's sources in `mine`, and the library in `out`."""

    def __init__(self, folder: Path) -> None:
        self.mine, self.out = folder / "mine", folder / "out"

    @property
    def operator(self) -> Path:
        """Its folder in the library."""
        return self.out / "kgen_ops" / NAME

    def row(self, gpu: str = "h200") -> RowState:
        """The only row of a GPU."""
        (row,) = read_table(self.operator / "tables" / f"{gpu}.yaml").rows
        return row

    def change(self, *changes: tuple[str, str]) -> None:
        """Replace texts in the operator's template of the rows, and in its search space."""
        folder = self.mine / "templates" / NAME
        files = [folder / "forward_vectors.cu.jinja", self.mine / "search_spaces" / f"{NAME}.yaml"]
        texts = [file.read_text() for file in files]
        for old, new in changes:
            assert any(old in text for text in texts), old
            texts = [text.replace(old, new) for text in texts]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)

    def renew(self) -> Emitted:
        """As `kgen emit` does."""
        return renew(self.out, lambda _: entry_of(self.mine), include_dir(),
                     lambda headers: open_compiler("nvrtc", [headers], jobs=1))  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose rows hold the digests of their code."""
    library = Library(tmp_path_factory.mktemp("made"))
    write_operator(NAME, library.mine, ())
    entry = entry_of(library.mine)
    emit(library.out, [winner_of(entry, "h200")], safe_kernels_of(entry), include_dir())
    assert not library.renew().stale
    return library.out.parent


@pytest.fixture
def library(made: Path, tmp_path: Path) -> Library:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return Library(tmp_path)


def test_rows_hold_the_code_of_their_cubins(library: Library) -> None:
    row = library.row()
    cubin = library.operator / "kernels" / f"{row.kernel}.sm_90a.cubin"
    assert row.code == code_of(cubin.read_bytes()).digest
    done = library.renew()
    assert (done.changed, done.removed, done.stale, done.compiled) == ((), (), (), 0)
    assert done.kept == 1 + 6  # the row; safe kernels of two passes and three dtypes


def test_a_module_that_kgen_has_no_more_goes(library: Library) -> None:
    runtime = library.operator.parent / "_runtime"
    (runtime / "gone.py").write_text("")
    done = library.renew()
    assert done.removed == ("kgen_ops/_runtime/gone.py",)
    assert (runtime / "cuda.py").exists()


RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "a comment": (
        ("No shared memory", "Neither shared memory\n//"), ("// elements per load", "// wide"),
    ),
    "a constant": (("kBlockN", "kColumnsPerBlock"),),
    "a local variable": (("tiles", "column_blocks"),),
    "the kernel": (
        (f"\n{NAME}_forward", f"\n{NAME}_by_vectors"), (f"({NAME}_forward", f"({NAME}_by_vectors"),
        (f"kernel: {NAME}_forward\n          grid: blocks",
         f"kernel: {NAME}_by_vectors\n          grid: blocks"),
    ),
    "a kernel parameter": (
        ("i64 x_stride_M)", "i64 pitch)"), ("row * x_stride_M", "row * pitch"),
        (LAUNCH, f"{LAUNCH}          args: {{pitch: x_stride_M}}\n"),
    ),
    "the reason of a rule": (("a vector must not reach into the next row", "whole vectors"),),
    "a let": (("blocks", "blocks_of_vectors"),),
}  # fmt: skip


@pytest.mark.parametrize("what", RENAMES)
def test_a_row_survives_a_rename(library: Library, what: str) -> None:
    before = library.row()
    library.change(*RENAMES[what])
    done = library.renew()
    after = library.row()
    assert done.stale == ()
    assert (after.code, after.record, after.median_us) == (
        before.code, before.record, before.median_us)
    kernels = library.operator / "kernels"
    cubin = (kernels / f"{after.kernel}.sm_90a.cubin").read_bytes()
    assert code_of(cubin).digest == before.code
    if after.kernel != before.kernel:
        assert not (kernels / f"{before.kernel}.sm_90a.cubin").exists()
    assert library.renew().changed == ()


@pytest.mark.parametrize("what", ["nothing", "a comment", "a constant"])
def test_a_lost_cubin_is_compiled_again(library: Library, what: str) -> None:
    before, kernels = library.row(), library.operator / "kernels"
    (kernels / f"{before.kernel}.sm_90a.cubin").unlink()
    library.change(*RENAMES.get(what, ()))
    done = library.renew()
    after = library.row()
    assert (done.stale, after.code) == ((), before.code)
    assert code_of((kernels / f"{after.kernel}.sm_90a.cubin").read_bytes()).digest == before.code
    assert library.renew().changed == ()


CHANGES: dict[str, tuple[str, str, str]] = {
    "an instruction": ("values[i] *= ", "values[i] += ", "its code changed"),
    "launch bounds": ("__launch_bounds__(kThreads)", "__launch_bounds__(kThreads, 8)", "its code"),
    "a grid": ("blocks: M * ceil_div", "blocks: 1 + M * ceil_div",
               "its launch plan changed: .* became "),
    "an argument": (LAUNCH, f"{LAUNCH}          args: {{N: M}}\n", "its launch plan"),
    "a syntax error": ("values[i] *= ", "values[i] *= = ", "it does not compile any more"),
    "the header is gone": ("kgen/primitives/memory.cuh", "kgen/primitives/memories.cuh",
                           "it does not render: "),
    "the variant is gone": ("forward:\n    vectors:\n", "forward:\n    wide_vectors:\n",
                            "no variant 'vectors' any"),
    "a choice is gone": ("vec: [8, 4, 2, 1]", "vec: [8, 2, 1]", "no such config any more"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_row_of_other_code_is_stale(library: Library, what: str) -> None:
    before, kernels = library.row(), library.operator / "kernels"
    kept = {p.name: p.read_bytes() for p in kernels.iterdir() if p.stem.startswith(before.kernel)}
    old, new, why = CHANGES[what]
    if what == "the variant is gone":
        folder = library.mine / "templates" / NAME
        template = folder / "forward_vectors.cu.jinja"
        shutil.copy(template, folder / "forward_wide_vectors.cu.jinja")
    library.change((old, new))
    (stale,) = library.renew().stale
    assert re.search(why, stale.why)
    assert stale.record == before.record
    command = f"kgen tune --op {NAME} --pass forward --gpu h200 --problem M=64,N=256"
    assert stale.command.startswith(command)
    is_gone = why.startswith(("no ", "it does not render"))
    assert stale.is_dropped is is_gone
    table = read_table(library.operator / "tables" / "h200.yaml")
    if is_gone:
        assert table.rows == ()
    else:
        assert table.rows == (before,)  # as it was proven: text, code and cubin
        assert {name: (kernels / name).read_bytes() for name in kept} == kept
        assert stale.was == before.code
        if "code" in why:
            assert stale.now not in ("", before.code)
    safe = read_safe(library.operator / "safe.yaml")
    assert len(safe) == 6


def test_a_host_row_is_known_by_its_text_without_comments(library: Library) -> None:
    emit(library.out, [winner_of(entry_of(library.mine), "host")], (), include_dir())
    assert not library.renew().stale
    before = library.row("host")
    library.change(("// elements per load", "// wide"))
    assert not library.renew().stale
    assert library.row("host").code == before.code
    assert library.row("host").kernel != before.kernel
    kernel = library.row("host").kernel
    library.change(("kBlockN", "kColumnsPerBlock"))
    (stale,) = library.renew().stale
    assert "host" in stale.where
    assert library.row("host").kernel == kernel
