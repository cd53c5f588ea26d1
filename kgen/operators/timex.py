"""TimeX: causal depthwise convolution with a filter as long as the sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from kgen.model.problem import Problem
from kgen.model.signature import Dim, DTypeField, Pass, Scalar, Signature, Tensor
from kgen.operators._shared import case_factor, moved_bytes, root_sum_square_scale
from kgen.operators.base import Cost, Operator

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Peer = Callable[[Tensors, Mapping[str, float]], object]

_W = Tensor("w", ("C", "T"), dtype="w_dtype", doc="dtype of k, or fp32; w[c, T-1] is tap 0.")
_K = Tensor("k", ("B", "C", "T"), doc="fp32, fp16 or bf16; contiguous.")

SIGNATURE = Signature(
    dims=(Dim("B", "batch"), Dim("C", "channels"), Dim("T", "time steps")),
    dtypes=(
        DTypeField("dtype", ("fp32", "fp16", "bf16")),
        DTypeField("w_dtype", ("dtype", "fp32"), default="dtype"),
    ),
    passes=(
        Pass(
            "forward",
            inputs=(_W, _K),
            outputs=(Tensor("out", ("B", "C", "T"), doc="dtype of k; contiguous."),),
            scalars=(Scalar("eps", 0.0, doc="Added to every output."),),
        ),
        Pass(
            "backward",
            inputs=(Tensor("gout", ("B", "C", "T"), doc="Gradient of out; dtype of k."), _W, _K),
            outputs=(
                Tensor("gw", ("C", "T"), dtype="w_dtype", doc="dtype of w; summed over B."),
                Tensor("gk", ("B", "C", "T"), doc="dtype of k; contiguous."),
            ),
        ),
    ),
)


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """out[b, c, t] = eps + sum over u <= t of w[c, T-1-(t-u)] * k[b, c, u], and its gradients.

    No zero is multiplied by a NaN of a step on which the output does not depend. 16-bit inputs are
    summed in fp32, and fp32 adds one term after the other, as a kernel does: the bound on kernels
    comes from the error of this sum. The order of float64 sums is irrelevant.
    """
    import torch

    w, k = inputs["w"], inputs["k"]
    sums = torch.promote_types(torch.promote_types(w.dtype, k.dtype), torch.float32)
    if pass_name == "forward":
        out = _causal(w.to(sums), k.to(sums)) + scalars["eps"]
        return {"out": out.to(k.dtype)}
    gout = inputs["gout"].to(sums)
    gk = _causal(w.to(sums), gout.flip(-1)).flip(-1)
    return {"gw": _correlate(gout, k.to(sums)).to(w.dtype), "gk": gk.to(k.dtype)}


def _causal(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y[b, c, t] = sum over d <= t of w[c, T-1-d] * x[b, c, t-d]."""
    import torch

    by_tiles = x.dtype == torch.float64 and x.shape[-1] > _SIDE
    return _causal_by_tiles(w, x) if by_tiles else _causal_by_taps(w, x)


def _correlate(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y[c, T-1-d] = sum over b and t >= d of g[b, c, t] * x[b, c, t-d]."""
    import torch

    by_tiles = x.dtype == torch.float64 and x.shape[-1] > _SIDE
    return _correlate_by_tiles(g, x) if by_tiles else _correlate_by_steps(g, x)


def _causal_by_taps(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`_causal`, with one pass over memory per tap."""
    import torch

    y = torch.zeros_like(x)
    steps = x.shape[-1]
    for d in range(steps):
        y[..., d:].addcmul_(x[..., : steps - d], w[:, steps - 1 - d, None])
    return y


def _correlate_by_steps(g: torch.Tensor, x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """`_correlate`, with one pass over memory per step t >= first."""
    steps = x.shape[-1]
    y = x.new_zeros(x.shape[1:])
    for t in range(first, steps):
        y[:, steps - 1 - t :] += (g[:, :, t, None] * x[:, :, : t + 1]).sum(0)
    return y


# Time is divided into tiles of _SIDE steps. If a tile of outputs is `gap` > 0 tiles after a tile of
# inputs, every output depends on every input, and a dense matrix product computes the contribution;
# all pairs of tiles of one gap share a matrix of taps. Within a tile (gap 0) the sum goes tap by
# tap. This takes about _SIDE + T / _SIDE passes over memory instead of T.
_SIDE = 32


def _causal_by_tiles(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`_causal`, with a matrix product for each gap between tiles; see `_SIDE`."""
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    batch, channels, steps = x.shape
    tiles = -(-steps // _SIDE)
    # Padding after the end affects only outputs after the end.
    x_tiles = _tiled(F.pad(x, (0, tiles * _SIDE - steps)))
    own = _causal_by_taps(w[:, -_SIDE:], _singly(x_tiles))
    y_tiles = own.transpose(0, 1).reshape(channels, tiles, batch, _SIDE).contiguous()
    taps = F.pad(w.flip(-1), (0, tiles * _SIDE - steps))  # taps[c, d]
    for gap in range(1, tiles):
        middle = gap * _SIDE
        # [c, u, t] of two tiles: taps[c, middle + t - u]
        between = taps[:, middle - _SIDE + 1 : middle + _SIDE].unfold(-1, _SIDE, 1).flip(1)
        y_tiles[:, gap:].flatten(1, 2).baddbmm_(x_tiles[:, : tiles - gap].flatten(1, 2), between)
    return y_tiles.permute(2, 0, 1, 3).flatten(2)[..., :steps]


def _correlate_by_tiles(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`_correlate`, with a matrix product for each gap between tiles; see `_SIDE`."""
    steps = x.shape[-1]
    tiles = steps // _SIDE
    whole = tiles * _SIDE
    # Padding zeros would multiply a NaN of x here, so steps outside of whole tiles are added
    # singly.
    y = _correlate_by_steps(g, x, first=whole).flip(-1)  # y[c, d] from here on
    g_tiles, x_tiles = _tiled(g[..., :whole]), _tiled(x[..., :whole])
    own = _correlate_by_steps(_singly(g_tiles), _singly(x_tiles))
    y[:, :_SIDE] += own.flip(-1)
    for gap in range(1, tiles):
        middle = gap * _SIDE
        # [c, u, t] of two tiles, which belongs to tap middle + t - u
        products = x_tiles[:, : tiles - gap].flatten(1, 2).mT @ g_tiles[:, gap:].flatten(1, 2)
        y[:, middle - _SIDE + 1 : middle + _SIDE] += _antidiagonals(products.flip(1))
    return y.flip(-1)


def _tiled(x: torch.Tensor) -> torch.Tensor:
    """[B, C, tiles * _SIDE] -> [C, tiles, B, _SIDE], contiguous, so that consecutive tiles form a
    matrix.
    """
    batch, channels, steps = x.shape
    return x.reshape(batch, channels, steps // _SIDE, _SIDE).permute(1, 2, 0, 3).contiguous()


def _singly(tiles: torch.Tensor) -> torch.Tensor:
    """The tiles of `_tiled` as a batch of short sequences, [tiles * B, C, _SIDE]."""
    return tiles.flatten(1, 2).transpose(0, 1)


def _antidiagonals(squares: torch.Tensor) -> torch.Tensor:
    """[C, S, S] -> [C, 2 S - 1]: sums of the elements with i + j = 0, 1 .. 2 S - 2.

    If rows of 2 S elements are read as rows of 2 S - 1, each row is shifted by one more element:
    row i begins in column i.
    """
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    channels, side, _ = squares.shape
    skewed = F.pad(squares, (0, side)).flatten(1)[:, : side * (2 * side - 1)]
    return skewed.reshape(channels, side, 2 * side - 1).sum(1)


def make_inputs(
    pass_name: str, problem: Problem, case: str, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw w, k and gout; the case decides their scale, their course in time and special values.

    `tiny` and `huge` scale k and gout by 1e-4 and 1e4 (fp16: 1e2). `decaying` gives w a decay of
    five decades and more, as trained filters have. `positive` makes all values positive, so that a
    bias of the summation accumulates. `alternating` makes neighbouring terms cancel. `impulse`
    keeps one step of k and gout. `spread` scales neighbouring steps, and batch rows, by very
    different powers of two. `nonfinite` plants a NaN, an Inf and a -Inf; steps that do not depend
    on them must stay finite.
    """
    import torch

    b, c, t = problem.shape(("B", "C", "T"))
    dtype = getattr(torch, problem.dtype("dtype").torch)
    w_dtype = getattr(torch, problem.dtype("w_dtype").torch)
    # 16-bit outputs must stay within fp16's range, so w shrinks with the number of terms.
    w = torch.randn(c, t, generator=generator, device=device) / max(t, 1) ** 0.5
    names = ("k",) if pass_name == "forward" else ("k", "gout")
    drawn = {
        name: torch.randn(b, c, t, generator=generator, device=device, dtype=dtype)
        for name in names
    }
    steps = torch.arange(t, device=device)
    if case == "decaying":
        w *= torch.exp((steps + 1 - t) * (12.0 / max(t, 1)))
    elif case == "positive":
        w = w.abs()
    elif case == "alternating":
        w = w.abs() * (1 - 2 * (steps % 2))
    for x in drawn.values():
        if case in ("tiny", "huge"):
            x *= case_factor(case, dtype)
        elif case in ("positive", "alternating"):
            x.abs_()
        elif case == "impulse":
            x[..., : t // 3] = 0
            x[..., t // 3 + 1 :] = 0
        elif case == "spread":
            reach = 40 if dtype == torch.float32 else 5  # 16 bits: stays within the range of fp16
            exponents = torch.randint(-reach, 1, (t,), generator=generator, device=device)
            x *= torch.exp2(exponents - torch.arange(b, device=device)[:, None, None] % 3 * 4.0)
        elif case == "nonfinite" and x.numel():
            x[0, 0, t // 2] = float("nan")
            x[b // 2, c // 2, t - 1] = float("inf")
            x[b - 1, c - 1, t // 3] = float("-inf")
    return {"w": w.to(w_dtype), **drawn}


def trained(
    pass_name: str, problem: Problem, inputs: Tensors, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """w and k as in RWKV's time mixing, for which the operator was written.

    w[c, T-1] = exp(first_c) and w[c, T-1-d] = exp(-(d - 1) exp(decay_c)): the filters of
    https://github.com/BlinkDL/RWKV-LM, RWKV-v3/src/model.py, with the decay of its initialisation,
    -5 + 8 place^1.35 in the middle layer, and log 0.3 with a zigzag of 0.5 as first. Strong
    channels are among them: most of their taps are 0 or subnormal. k is exp(key) * value there,
    with keys and values of unit variance, as at the initialisation.
    """
    import torch

    w, k = inputs["w"], inputs["k"]
    channels, steps = w.shape
    place = torch.arange(channels, device=w.device)
    decay = (-5 + 8 * (place / max(channels - 1, 1)) ** 1.35).exp()[:, None]
    taps = torch.exp(-decay * torch.arange(steps - 2, -2, -1, device=w.device))
    if steps:
        taps[:, -1] = math.log(0.3) + 0.5 * ((place + 1) % 3 - 1)
        taps[:, -1].exp_()
    key = torch.randn(k.shape, generator=generator, device=k.device)
    return {"w": taps.to(w.dtype), "k": (key.exp() * k).to(k.dtype)}


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """max(|y|, root of the sum of the terms' squares); see `root_sum_square_scale`."""
    squares = {name: x.square() for name, x in inputs.items()}
    terms = definition(pass_name, squares, {"eps": scalars.get("eps", 0.0) ** 2})
    return root_sum_square_scale(outputs, terms)


def cost(pass_name: str, problem: Problem) -> Cost:
    """Every tensor once; a multiply-add per pair u <= t, in each of the two gradients.

    This counts the direct algorithm. A Fourier transform needs fewer operations for a long T, so a
    kernel may reach more than 100 % of this floor.
    """
    b, c, t = problem.shape(("B", "C", "T"))
    moved = moved_bytes(SIGNATURE.pass_named(pass_name), problem)
    flops = b * c * t * (t + 1)
    # One operand in fp32 requires fp32 accuracy of all products.
    wide = "fp32" in (problem.dtype("dtype").name, problem.dtype("w_dtype").name)
    unit: Literal["3xhalf", "half"] = "3xhalf" if wide else "half"
    return Cost(bytes=moved, flops=flops if pass_name == "forward" else 2 * flops, unit=unit)


def peers(pass_name: str) -> dict[str, Peer]:
    """conv1d with a group per channel, as the operator's authors wrote it; the FFT, as long
    convolutions are usually written; and the FFT compiled."""
    import torch
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    def eager_forward(inputs: Tensors, scalars: Mapping[str, float]) -> object:
        w, k = inputs["w"].to(inputs["k"].dtype), inputs["k"]
        steps, channels = k.shape[-1], k.shape[1]
        return F.conv1d(F.pad(k, (steps - 1, 0)), w[:, None], groups=channels) + scalars["eps"]

    def eager_backward(inputs: Tensors, scalars: Mapping[str, float]) -> object:
        w = inputs["w"].detach().requires_grad_()
        k = inputs["k"].detach().requires_grad_()
        with torch.enable_grad():
            out = eager_forward({"w": w, "k": k}, {"eps": 0.0})
        assert isinstance(out, torch.Tensor)
        return torch.autograd.grad(out, (w, k), inputs["gout"])

    def fft_forward(w: torch.Tensor, k: torch.Tensor, eps: float) -> torch.Tensor:
        steps = k.shape[-1]
        product = _spectrum(w.flip(-1)) * _spectrum(k)
        out: torch.Tensor = torch.fft.irfft(product, n=2 * steps)[..., :steps] + eps
        return out.to(k.dtype)

    def fft_backward(
        gout: torch.Tensor, w: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps = k.shape[-1]
        g = _spectrum(gout)
        gk = torch.fft.irfft(g * _spectrum(w.flip(-1)).conj(), n=2 * steps)[..., :steps]
        gw = torch.fft.irfft((g * _spectrum(k).conj()).sum(0), n=2 * steps)[..., :steps]
        return gw.flip(-1).to(w.dtype), gk.to(k.dtype)

    # See rmsnorm's peers: past a number of recompilations Dynamo silently runs a function eagerly.
    torch._dynamo.reset()
    if pass_name == "forward":
        compiled = torch.compile(fft_forward, dynamic=False)
        return {
            "eager": eager_forward,
            "fft": lambda inputs, scalars: fft_forward(inputs["w"], inputs["k"], scalars["eps"]),
            "torch.compile": lambda inputs, scalars: compiled(
                inputs["w"], inputs["k"], scalars["eps"]
            ),
        }
    compiled_backward = torch.compile(fft_backward, dynamic=False)
    return {
        "eager": eager_backward,
        "fft": lambda inputs, scalars: fft_backward(inputs["gout"], inputs["w"], inputs["k"]),
        "torch.compile": lambda inputs, scalars: compiled_backward(
            inputs["gout"], inputs["w"], inputs["k"]
        ),
    }


def _spectrum(x: torch.Tensor) -> torch.Tensor:
    """The Fourier transform in fp32, zero-padded to twice the length, so that nothing wraps around.
    """
    import torch

    spectrum: torch.Tensor = torch.fft.rfft(x.float(), n=2 * x.shape[-1])
    return spectrum


OPERATOR = Operator(
    name="timex",
    summary="Causal depthwise convolution with a filter as long as the sequence.",
    source="B. Peng, RWKV-CUDA, depthwise_conv1d (`TimeX`), 2022.",
    doc=(
        "out[b, c, t] = eps + sum over u <= t of w[c, T-1-(t-u)] * k[b, c, u]\n\n"
        "gk[b, c, u] = sum over t >= u of w[c, T-1-(t-u)] * gout[b, c, t]\n"
        "gw[c, T-1-d] = sum over b and t >= d of gout[b, c, t] * k[b, c, t-d]"
    ),
    signature=SIGNATURE,
    definition=definition,
    make_inputs=make_inputs,
    cases=("tiny", "huge", "decaying", "positive", "alternating", "impulse", "spread", "nonfinite"),
    cost=cost,
    problems={
        "cuda": (
            "B=32,C=768,T=768,dtype=fp32",
            "B=8,C=2048,T=512,dtype=fp32",
            "B=32,C=768,T=768,dtype=bf16",
            "B=8,C=2048,T=512,dtype=bf16",
            "B=1,C=768,T=1024,dtype=fp32",
            "B=5,C=67,T=1000,dtype=fp32",
            "B=2,C=768,T=4096,dtype=fp32",
        ),
        "host": (
            "B=8,C=4,T=64,dtype=fp32",
            "B=3,C=5,T=50,dtype=bf16",
        ),
    },
    peers=peers,
    scale=scale,
    aliases=("depthwise_conv1d",),
    slab_dim="C",
    widens=True,
    trained=trained,
)
