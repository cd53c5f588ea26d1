"""Generated plan functions do what `make_plan` says: grids, blocks, arguments, scratch memory."""

from __future__ import annotations

import importlib
import inspect
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kgen.runtime
from kgen.emit.binding import bound_plan, literals
from kgen.emit.python import operator_module, safe_module, table_module
from kgen.emit.state import GpuState, RowState, SafeState, TableState, read_table, table_text
from kgen.errors import CatalogueError
from kgen.model.config import Config
from kgen.model.expr import parse_expr
from kgen.model.signature import Dim, DTypeField, Pass, Scalar, Signature, Tensor
from kgen.model.space import LaunchSpec, Rule, RuleKind, Variant, WorkspaceSpec
from kgen.operators.base import Cost, Operator
from kgen.runtime.device import KernelFile
from kgen.runtime.rows import PreparedLaunch

SIGNATURE = Signature(
    dims=(Dim("M", "rows"), Dim("N", "columns")),
    dtypes=(DTypeField("dtype", ("fp32", "bf16")),),
    passes=(Pass(
        "forward",
        inputs=(Tensor("x", ("M", "N"), free_strides=("M",), flatten_leading=True),),
        outputs=(Tensor("y", ("M", "N"), flatten_leading=True),
                 Tensor("scale", ("M",), dtype="fp32", flatten_leading=True)),
        scalars=(Scalar("eps", 1e-6),),
    ),),
)


def launch(kernel: str, grid: tuple[str, ...], smem: str, *args: str) -> LaunchSpec:
    """A launch of 64-thread blocks."""
    return LaunchSpec(kernel, tuple(map(parse_expr, grid)), (parse_expr("threads"),),
                      parse_expr(smem), args)


def variant(name: str, rule: str | None = None, safe: bool = False) -> Variant:
    """Two kernels with scratch between them."""
    return Variant(
        name=name, pass_name="forward", doc="", params=(), constants=() if safe else ("N",),
        requires=(Rule(parse_expr(rule), "", "s.yaml:1"),) if rule else (), guards=(),
        launches=(
            launch("sums", ("min(ceil_div(M, rows), 2 * sm_count)",), "N * itemsize",
                   "x", "partial", "M", "x_stride_M"),
            launch("scales", ("M",), "0", "partial", "y", "scale", "M", "N", "eps"),
        ),
        workspaces=(WorkspaceSpec("partial", "fp32", parse_expr("M * rows")),),
        first=(), safe=None, where="s.yaml:1",
    )


def row(v: Variant, m: int, **config: Any) -> RowState:
    """A row of N = 4096."""
    chosen = Config.of(v.name, {"threads": 64, "rows": 4, **config})
    fixed = literals({"N": 4096}, {"dtype": "bf16"}, chosen.as_dict(), {"sm_count": 132})
    return RowState("forward", (("M", m), ("N", 4096)), (("dtype", "bf16"),), v.name,
                    chosen.values, ("N",), "0123456789ab", "r1", 3.25,
                    bound_plan(v, SIGNATURE.passes[0], fixed))


class File:
    """Stands for a loaded kernel file; writes down launches."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.pdl: list[bool] = []  # of the launchers made

    def launcher(self, kernel: str, arguments: str, block: tuple[int, int, int],
                 smem: int, pdl: bool = False, coresident: int = 0) -> Callable[..., None]:
        """Return a launcher that writes down what it is called with."""
        self.pdl.append(pdl)

        def record(*args: Any) -> None:
            self.calls.append((kernel, arguments, block, smem, args))

        return record

    def scratch(self, elements: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Return what allocates a workspace."""
        return lambda: torch.empty(elements, dtype=dtype)


Import = Callable[[str, str], ModuleType]


@pytest.fixture
def import_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Import a generated text as module `fakelib.<path>`, beside a copy of the runtime."""
    library = tmp_path / "fakelib"
    shutil.copytree(kgen.runtime.__path__[0], library / "_runtime")
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(path: str, text: str) -> ModuleType:
        target = library / f"{path.replace('.', '/')}.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(f"fakelib.{path}")

    yield load
    for name in [name for name in sys.modules if name.split(".")[0] == "fakelib"]:
        del sys.modules[name]


def table(*rows: RowState) -> str:
    """The generated table of some rows."""
    gpu = GpuState("h200", "H200", (), "sm_90a", (("sm_count", 132),))
    return table_module("op", SIGNATURE, TableState(gpu, rows))


def test_a_chain_with_scratch(import_module: Import) -> None:
    (made,) = import_module("op.tables.h200", table(row(variant("split"), 100))).FORWARD
    call = sys.modules["fakelib._runtime.rows"].Call(M=10, N=4096, x_stride_M=5000)
    assert made.fits(call) is True
    file = File()
    made.bind(file, call)(7, 1000, 2000, 3000, 0.5)
    first, second = file.calls
    assert first[:4] == ("sums", "ppqq", (64, 1, 1), 8192)
    assert first[4][:5] == (7, 3, 1, 1, 1000)
    assert first[4][6:] == (10, 5000)
    scratch = first[4][5]
    assert second == ("scales", "pppqqf", (64, 1, 1), 0,
                      (7, 10, 1, 1, scratch, 2000, 3000, 10, 4096, 0.5))


def with_pdl(**config: Any) -> RowState:
    """A row whose kernels have programmatic dependent launch where the config says so."""
    v = variant("split")
    first, second = v.launches
    first = replace(first, pdl=parse_expr("overlap == 2"))
    second = replace(second, pdl=parse_expr("overlap >= 1"))
    return row(replace(v, launches=(first, second)), 100, **config)


def test_a_later_launch_with_pdl(import_module: Import) -> None:
    text = table(with_pdl(overlap=1))
    (made,) = import_module("op.tables.h200", text).FORWARD
    call = sys.modules["fakelib._runtime.rows"].Call
    assert text.count("pdl=") == 1
    # Where the first launch has no blocks, the second must not overlap what precedes the plan.
    for rows, pdl in ((10, True), (0, False)):
        file = File()
        made.bind(file, call(M=rows, N=4096, x_stride_M=5000))
        assert file.pdl == [False, pdl]


def test_a_first_launch_with_pdl(import_module: Import) -> None:
    (made,) = import_module("op.tables.h200", table(with_pdl(overlap=2))).FORWARD
    call = sys.modules["fakelib._runtime.rows"].Call
    # The first launch may overlap what precedes the plan. The second may not do so in its place.
    for rows, pdl in ((10, True), (0, False)):
        file = File()
        made.bind(file, call(M=rows, N=4096, x_stride_M=5000))
        assert file.pdl == [True, pdl]


def test_a_launch_without_pdl_is_written_without_the_key(tmp_path: Path) -> None:
    never, no = row(variant("split"), 100, overlap=0), with_pdl(overlap=0)
    assert no == never
    gpu = GpuState("h200", "H200", (), "sm_90a", (("sm_count", 132),))
    file = tmp_path / "h200.yaml"
    for overlap in (0, 1, 2):
        made = with_pdl(overlap=overlap)
        file.write_text(table_text(TableState(gpu, (made,))))
        assert file.read_text().count("pdl: true") == overlap  # launches that have it
        assert "pdl: false" not in file.read_text()
        assert read_table(file).rows == (made,)


def test_tables_from_before_the_key_pdl_are_read(tmp_path: Path) -> None:
    """The first launch's key was `early`, a later launch's `overlaps`."""
    gpu = GpuState("h200", "H200", (), "sm_90a", (("sm_count", 132),))
    made = with_pdl(overlap=2)
    text = table_text(TableState(gpu, (made,))).replace("pdl: true", "early: true", 1)
    file = tmp_path / "h200.yaml"
    file.write_text(text.replace("pdl: true", "overlaps: true"))
    assert read_table(file).rows == (made,)


def test_launchers_of_the_runtime_have_the_key_that_plans_write() -> None:
    """`File` above stands for the runtime's kernel files: it must take the same arguments."""
    fake, real = (inspect.signature(kind.launcher).parameters for kind in (File, KernelFile))
    assert list(fake) == list(real)


def test_rows_of_equal_plans_share_a_function(import_module: Import) -> None:
    rows = [row(variant("split"), 100), row(variant("split"), 200),
            row(variant("split", "M >= 8 * rows"), 300)]
    first, second, third = import_module("op.tables.h200", table(*rows)).FORWARD
    assert first.bind is second.bind
    assert third.bind is not first.bind
    call = sys.modules["fakelib._runtime.rows"].Call
    assert third.fits(call(M=32)) is True
    assert third.fits(call(M=31)) is False


def test_rows_ask_for_what_is_legal_alone(import_module: Import) -> None:
    rules = (
        Rule(parse_expr("M >= 8 * rows"), "", "s.yaml:1"),
        Rule(parse_expr("M >= 64 * rows"), "", "s.yaml:2", RuleKind.EFFICIENCY),
    )
    only = row(replace(variant("split"), requires=rules), 300)
    (made,) = import_module("op.tables.h200", table(only)).FORWARD
    call = sys.modules["fakelib._runtime.rows"].Call
    assert made.fits(call(M=32)) is True
    assert made.fits(call(M=31)) is False


def test_safe_plans_ask_the_device(import_module: Import) -> None:
    v = variant("split", safe=True)
    config = Config.of("split", {"threads": 64, "rows": 4})
    states = [
        SafeState("forward", (("dtype", dtype),), "split", config.values, "0123456789ab",
                  bound_plan(v, SIGNATURE.passes[0],
                            literals({}, {"dtype": dtype}, config.as_dict(), {})))
        for dtype in ("fp32", "bf16")
    ]
    fp32, bf16 = import_module("op.safe", safe_module("op", SIGNATURE, states)).FORWARD
    assert fp32.bind is not bf16.bind  # shared memory depends on the itemsize
    call = sys.modules["fakelib._runtime.rows"].Call(M=1000, N=100, x_stride_M=100)
    file = File()
    fp32.bind(file, call, {"sm_count": 3})(0, 1, 2, 3, 0.5)
    assert file.calls[0][3] == 400
    assert file.calls[0][4][1] == 6


def test_long_configs_are_laid_out(import_module: Import) -> None:
    config = {f"parameter_number_{i}": "streaming" for i in range(12)}
    text = table(row(variant("split"), 100, **config))
    assert max(map(len, text.splitlines())) <= 100
    (made,) = import_module("op.tables.h200", text).FORWARD
    assert made.config.startswith("split(threads=64, rows=4, parameter_number_0=streaming, ")
    assert made.config.endswith("parameter_number_11=streaming)")


def test_two_outputs(import_module: Import) -> None:
    def unused(*_: Any) -> Any:
        raise AssertionError("the generated library does not need it")

    operator = Operator(
        name="twofold", summary="Two results.", source="here", doc="y = x", signature=SIGNATURE,
        definition=unused, make_inputs=unused, cases=(), cost=lambda *_: Cost(0, 0), problems={},
        peers=unused,
    )
    module = import_module("twofold", operator_module(operator, ["forward"]).replace("..", "."))
    x = torch.ones(2, 3, 8, dtype=torch.bfloat16)
    y, scale = module.twofold(x.to("meta"))
    assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
    assert (scale.shape, scale.dtype) == ((2, 3), torch.float32)
    module._prepared_forward.__self__.clear()
    seen = []
    x_ptr = x.data_ptr()
    key = (x.shape, x.stride(), x.dtype, -1, x_ptr & 31)
    module.FORWARD.prepared[key] = PreparedLaunch(
        lambda *args: seen.append(args), lambda device: 0, -1,
        (lambda: torch.empty_like(x), lambda: torch.empty(2, 3)), unused,
    )
    y, scale = module.twofold(x, 0.25)
    assert scale.shape == (2, 3)
    assert seen == [(0, x_ptr, y.data_ptr(), scale.data_ptr(), 0.25)]


@pytest.mark.parametrize(("name", "argument"), [("explain", "x"), ("_op", "x"), ("op", "launch")])
def test_names_that_would_clash_are_refused(name: str, argument: str) -> None:
    passed = Pass("forward", (Tensor(argument, ("M",)),), (Tensor("y", ("M",)),))
    operator = Operator(
        name=name, summary="", source="", doc="",
        signature=Signature((Dim("M", ""),), (DTypeField("dtype", ("fp32",)),), (passed,)),
        definition=lambda *_: {}, make_inputs=lambda *_: {}, cases=(),
        cost=lambda *_: Cost(0, 0), problems={}, peers=lambda _: {},
    )
    with pytest.raises(CatalogueError, match="cannot be"):
        operator_module(operator, ["forward"])
