"""The generated library on the CPU: right results, the ladder, layouts, errors, torch.compile."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def definition(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """The oracle."""
    x64 = x.double()
    return x64 * (x64.square().mean(-1, keepdim=True) + eps).rsqrt() * w.double()


def check(kgen_ops: ModuleType, x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Call the operator and compare with the oracle."""
    y: Tensor = kgen_ops.rmsnorm(x, w, eps=eps)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    torch.testing.assert_close(y.double(), definition(x, w, eps), rtol=TOLERANCE[x.dtype],
                               atol=1e-6)
    return y


@pytest.fixture(scope="module")
def forward(kgen_ops: ModuleType) -> Any:
    """The pass object behind the public function."""
    return sys.modules["kgen_ops.rmsnorm"].FORWARD


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", ["same", "fp32"])
@pytest.mark.parametrize("n", [16, 17])
def test_agrees_with_the_definition(
    kgen_ops: ModuleType, x_dtype: str, w_dtype: str, n: int
) -> None:
    w = torch.randn(n, dtype=DTYPES[x_dtype if w_dtype == "same" else w_dtype])
    check(kgen_ops, torch.randn(9, n, dtype=DTYPES[x_dtype]), w)


@pytest.mark.parametrize(
    ("dims", "step", "config"),
    [
        ((8, 16), "exact", "fixed_row(threads=32, vec=4)"),
        ((512, 16), "exact", "fixed_row(threads=64, vec=4)"),
        ((60, 16), "nearest", "fixed_row(threads=32, vec=4)"),  # 8 is 7.5 times away, 512 8.5
        ((70, 16), "nearest", "fixed_row(threads=64, vec=4)"),
        ((8, 48), "safe", "any_row(threads=32)"),
    ],
)
def test_ladder(kgen_ops: ModuleType, dims: tuple[int, int], step: str, config: str) -> None:
    m, n = dims
    why = kgen_ops.explain("rmsnorm", M=m, N=n, dtype="fp32", device="cpu")
    assert (why.step, why.config) == (step, config)
    assert why.gpu == "host"
    assert step in str(why)
    if step == "safe":
        assert why.median_us is None
    else:
        assert why.evidence == "measured"
        assert why.record in str(why)
        assert why.median_us == 10.0
    check(kgen_ops, torch.randn(m, n), torch.randn(n))


def test_guards_decide_at_the_call(kgen_ops: ModuleType, forward: Any) -> None:
    """A row that wants 16-byte aligned rows must not get others: the safe variant serves them."""
    w = torch.randn(16)
    storage = torch.randn(8 * 18 + 1)
    views = [
        storage[1:129].view(8, 16),  # 4 bytes off
        storage[:144].view(8, 18)[:, :16],  # rows 72 bytes apart
    ]
    for x in views:
        before = set(forward.prepared)
        check(kgen_ops, x, w)
        (key,) = set(forward.prepared) - before
        launch = forward.prepared[key].launch
        assert launch.__qualname__.startswith("any_row")
    check(kgen_ops, storage[:128].view(8, 16), w)


def test_row_strides_need_no_copy(kgen_ops: ModuleType, forward: Any) -> None:
    x = torch.randn(8, 32)[:, :16]
    check(kgen_ops, x, torch.randn(16))
    assert any(key[1] == (32, 1) for key in forward.prepared)


@pytest.mark.parametrize("shape", [(16,), (1, 16), (2, 3, 16), (2, 1, 3, 16), (1, 1, 1, 16)])
def test_any_number_of_leading_dims(kgen_ops: ModuleType, shape: tuple[int, ...]) -> None:
    check(kgen_ops, torch.randn(shape), torch.randn(16))


@pytest.mark.parametrize(
    ("view", "copied"),
    [
        (lambda: torch.randn(4, 6, 32)[:, :, :16], False),  # one stride for both
        (lambda: torch.randn(4, 6, 16).transpose(0, 1), True),
        (lambda: torch.randn(4, 6, 16)[:, :3], True),
        (lambda: torch.randn(4, 1, 16)[::2], False),
        (lambda: torch.randn(1, 16).expand(5, 16), False),  # stride 0
    ],
)
def test_leading_dims_are_viewed_where_strides_allow(
    kgen_ops: ModuleType, forward: Any, view: Any, copied: bool
) -> None:
    x = view()
    check(kgen_ops, x, torch.randn(16))
    assert any(key[:2] == (x.shape, x.stride()) for key in forward.prepared) is not copied


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16), (0, 0, 16)])
def test_empty(kgen_ops: ModuleType, shape: tuple[int, ...]) -> None:
    y = kgen_ops.rmsnorm(torch.empty(shape), torch.ones(16))
    assert y.shape == shape


def test_a_cached_call_sees_new_values(kgen_ops: ModuleType) -> None:
    w = torch.randn(16)
    for eps in (1e-6, 0.5, 1):
        for _ in range(2):
            check(kgen_ops, torch.randn(8, 16), w, eps)


X, W = torch.ones(8, 16), torch.ones(16)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((X, torch.ones(17)), ValueError, r"w has shape \(17,\), so N = 17, but x says N = 16"),
        ((X, torch.ones(1, 16)), ValueError, r"w has shape \(1, 16\); want w \[N\]"),
        ((torch.ones(()), W), ValueError, r"x has shape \(\); want x \[\.\.\., N\]"),
        ((torch.ones(4, 0), torch.ones(0)), ValueError, "N = 0 .* at least 1"),
        ((X.double(), W), TypeError, "x has dtype torch.float64; supported: fp32, fp16, bf16"),
        ((X, W.half()), TypeError, "w_dtype = fp16 is not supported\n  allowed here: fp32"),
        ((X, [1.0] * 16), TypeError, "w must be a tensor, not list"),
        ((torch.ones(16, 8).t(), W[:16]), ValueError, "dim N must be contiguous"),
        ((X, torch.ones(32)[::2]), ValueError, r"pass w\.contiguous\(\)"),
        ((X, W, None, 0.0), ValueError, "eps = 0.0 must be greater than 0"),
        ((X, W, None, float("nan")), ValueError, "eps = nan must be greater than 0"),
        ((X[:5], W, None, 1e-6, "1"), TypeError, "offset must be a number, not str"),
        ((X[:5], W, None, 1e-6, None), TypeError, "offset must be a number, not NoneType"),
        ((X[:5], W, None, 1e-6, 1j), TypeError, "offset must be a number, not complex"),
        ((X, W, 1e-6), TypeError, "residual must be a tensor, not float"),
        ((None, W), TypeError, "x must be a tensor, not NoneType"),
        ((X, W, X[:4]), ValueError, r"residual has leading dims \(4,\), but x has \(8,\)"),
        ((X, W, X.half()), TypeError, "residual_dtype = fp16 is not supported"),
        ((X, W.to("meta")), ValueError, "w is on meta, but x is on cpu"),
        ((X.double(), W), TypeError, r"x has dtype torch\.float64; supported: fp32, fp16, bf16$"),
        ((X, W.double()), TypeError, r"w has .*float64; supported: fp32, fp16, bf16$"),
    ],
)
def test_errors(
    kgen_ops: ModuleType, args: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        kgen_ops.rmsnorm(*args)
    assert str(raised.value).startswith("rmsnorm: ")


def close(got: Tensor, want: Tensor) -> None:
    """Compare an fp32 result with the oracle."""
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 16), (2, 3, 17), (16,)])
@pytest.mark.parametrize("calls", [1, 2])
def test_optional_tensors(kgen_ops: ModuleType, shape: tuple[int, ...], calls: int) -> None:
    x, w, residual = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)
    ones = torch.ones(shape[-1])
    for _ in range(calls):  # the second call takes the prepared launch
        close(kgen_ops.rmsnorm(x), definition(x, ones))
        offset = kgen_ops.rmsnorm(x, w, offset=1.0)
        close(offset, definition(x, w + 1))
        y, rstd = kgen_ops.rmsnorm(x, w, return_rstd=True)
        close(y, definition(x, w))
        assert rstd.shape == shape[:-1]
        want = (x.double().square().mean(-1) + 1e-6).rsqrt()
        close(rstd, want)
        y, h = kgen_ops.rmsnorm(x, w, residual)
        close(h, x + residual)
        close(y, definition(x + residual, w))
        found = kgen_ops.rmsnorm(x, residual=residual, return_rstd=True)
        assert [t.shape for t in found] == [x.shape, x.shape, shape[:-1]]
        close(found[0], definition(x + residual, ones))


def test_optional_tensors_through_the_dispatcher(kgen_ops: ModuleType) -> None:
    torch._dynamo.reset()
    x, residual = torch.randn(8, 16), torch.randn(8, 16)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        y, h, rstd = kgen_ops.rmsnorm(x * 2, W, residual, return_rstd=True)
        return y + 1, h, rstd, kgen_ops.rmsnorm(h)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, residual), block(x, residual))
    with FakeTensorMode() as mode:
        found = kgen_ops.rmsnorm(mode.from_tensor(X), None, mode.from_tensor(X), return_rstd=True)
    assert [(t.shape, t.dtype) for t in found] == [
        ((8, 16), torch.float32), ((8, 16), torch.float32), ((8,), torch.float32)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(kgen_ops: ModuleType, dynamic: bool) -> None:
    torch._dynamo.reset()

    def block(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = kgen_ops.rmsnorm(x * 2, w)
        return y + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (4, 9):
        x, w = torch.randn(m, 16), torch.randn(16)
        torch.testing.assert_close(compiled(x, w), block(x, w))


def test_meta_and_fake_tensors(kgen_ops: ModuleType) -> None:
    y = kgen_ops.rmsnorm(X.to("meta"), W.to("meta"))
    assert (y.shape, y.device.type) == (X.shape, "meta")
    with FakeTensorMode() as mode:
        y = kgen_ops.rmsnorm(mode.from_tensor(X), mode.from_tensor(W))
    assert y.shape == X.shape


@pytest.mark.parametrize(
    ("args", "problem", "error", "message"),
    [
        (("softmax",), {}, ValueError, "no operator 'softmax'\n  known: .*rmsnorm"),
        ((None,), {}, ValueError, "no operator 'None'"),
        (("rmsnorm",), {"M": 8, "N": 0, "dtype": "fp32"}, ValueError, "N = 0 is .* extent >= 1"),
        (("rmsnorm",), {"M": 10**400, "N": 8, "dtype": "fp32"}, ValueError, "of 64 bits"),
        (("rmsnorm",), {"M": True, "N": 8, "dtype": "fp32"}, ValueError, "M = True"),
        (("rmsnorm",), {"M": 8, "dtype": "fp32"}, ValueError, "has dims M, N; got M"),
        (("rmsnorm",), {"M": 8, "N": 16}, TypeError, "dtype is missing"),
        (("rmsnorm",), {"M": 8, "N": 16, "dtype": "fp8"}, TypeError, "fp8 is not supported"),
        (("rmsnorm",), {"M": "x", "N": 1, "dtype": "fp32"}, ValueError, "M = 'x'"),
        (("rmsnorm",), {"M": 8, "N": 16, "pass_name": "sideward"}, ValueError,
         "no pass 'sideward'\n  known: forward"),
    ],
)
def test_explain_errors(
    kgen_ops: ModuleType, args: tuple[str], problem: dict[str, Any], error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        kgen_ops.explain(*args, device="cpu", **problem)


def test_prepared_launches_are_bounded(
    kgen_ops: ModuleType, forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["kgen_ops._runtime.dispatch"], "MAX_PREPARED", 4)
    forward.forget()
    for m in range(1, 12):
        kgen_ops.rmsnorm(torch.ones(m, 16), W)
        assert 1 <= len(forward.prepared) <= 4


def test_same_architecture_then_safe(
    kgen_ops: ModuleType, forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU without a table, one of the same architecture lends its rows, else none."""
    dispatch = sys.modules["kgen_ops._runtime.dispatch"]
    tables = sys.modules["kgen_ops.rmsnorm.tables"]
    host = tables.GPUS[0]
    lent = host._replace(name="host", arch="sm_90a", facts={**host.facts, "compute_capability": 90})
    device = torch.device("cuda", 0)
    loaded = sys.modules["kgen_ops._runtime.device"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Unheard Of")
    monkeypatch.setattr(tables, "GPUS", (lent,))
    for capability, step, same in ((90, "exact", False), (80, "safe", True)):
        monkeypatch.setattr(forward.tables, "_tables", {})
        monkeypatch.setattr(loaded, "gpu_facts",
                            lambda device, cc=capability: {"sm_count": 3, "compute_capability": cc})
        why = forward.explain({"M": 8, "N": 16}, {"dtype": "fp32"}, device)
        assert (why.step, why.same_gpu) == (step, same)
    monkeypatch.setattr(tables, "GPUS", (lent,))
    monkeypatch.setattr(forward.tables, "_tables", {})
    with pytest.raises(dispatch.DispatchError, match="kgen tune --op rmsnorm --gpu host"):
        forward.explain({"M": 8, "N": 16}, {"dtype": "fp32"}, torch.device("cpu"))
