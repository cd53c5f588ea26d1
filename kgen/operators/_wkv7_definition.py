"""The recurrence of RWKV-7 and its gradients, in plain torch, one step after the other.

This is the definition of wkv7_decode. wkv7 uses `_wkv7_chunks`, which takes fewer torch ops per
step; tests compare the two.

Here steps come first, [T, B, H, features]; states are [B, H, K, V]. In fp32 the roundings are those
of a kernel: a product with a state is one sum over its keys or values, and a new state is the
decayed one, plus b sa^T, plus k v^T. In float64 the same loop is the oracle: nothing divides by a
decay, and no exponent is positive, so decays of 0 and 1 are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kgen.operators._shared import widened

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

# The largest |log d| of decay_form=clamp.
CLAMP = math.exp(-0.5)

_ROWS = ("r", "k", "v", "a", "b", "gy", "decay", "sa", "gsa")
_STATES = ("initial_state", "gfinal_state", "final_state", "ginitial_state")


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The recurrence of the operator's `doc`, in fp32 or wider.

    `scalars` may say which form w has (`decay_form=raw`: 1); else it is the log decay.
    """
    x = {n: widened(y) if y.is_floating_point() else y for n, y in inputs.items()}
    decay, slope = decays(x["w"], scalars)
    found = recurrence(pass_name, x | {"decay": decay}, scalars["scale"])
    like = {"y": "v", "gr": "r", "gw": "w", "gk": "k", "gv": "v", "ga": "a", "gb": "b"}
    if "gdecay" in found:
        found["gw"] = slope * found.pop("gdecay")
    return {
        n: y.to(inputs[like[n]].dtype) if n in like else y
        for n, y in found.items()
        if n in like or n in _STATES
    }


def decays(w: torch.Tensor, scalars: Mapping[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """(d, dd/dw) for w in the decay form that `scalars` gives."""
    import torch

    if scalars.get("decay_form=raw"):
        decay = torch.exp(-w.exp())
        # Where the decay is 0, exp(w) may be infinite.
        return decay, torch.where(decay == 0, 0.0, -w.exp() * decay)
    if scalars.get("decay_form=clamp"):
        decay = torch.exp(-CLAMP * w.sigmoid())
        return decay, -CLAMP * w.sigmoid() * (-w).sigmoid() * decay
    return w.exp(), w.exp()


def recurrence(
    pass_name: str, x: Tensors, scale: float, magnitudes: bool = False
) -> dict[str, torch.Tensor]:
    """The definition with decays (`decay`) instead of w; their gradient is `gdecay`.

    Also returns `sa`, and in the backward pass its gradient `gsa`, both [B, T, H, V]. If x has
    these names, they replace the sums over keys: the states are then those of a linear attention
    with two keys per step.

    Args:
        pass_name: `forward` or `backward`.
        x: Inputs of the pass, `decay`, and optionally `sa` and `gsa`.
        scale: The factor of y.
        magnitudes: Return max(|sa|, root of the sum of its terms' squares) as sa; likewise gsa.
    """
    import torch

    of_sequence = _forward if pass_name == "forward" else _backward
    if "cu_seqlens" not in x:
        return of_sequence(x, scale, magnitudes)
    made = []
    for n, (first, last) in enumerate(itertools.pairwise(x["cu_seqlens"].tolist())):
        its = {name: y[:, first:last] for name, y in x.items() if name in _ROWS}
        its |= {name: y[n : n + 1] for name, y in x.items() if name in _STATES}
        made.append(of_sequence(its, scale, magnitudes))
    return {
        name: torch.cat([its[name] for its in made], dim=0 if name in _STATES else 1)
        for name in made[0]
    }


def _steps(x: Tensors, names: str) -> list[list[torch.Tensor]]:
    """The steps of each named tensor, [B, H, features] each."""
    return [list(x[name].unbind(1)) for name in names.split()]


def _stacked(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.stack(rows, dim=1) if rows else like


def _column(row: torch.Tensor) -> torch.Tensor:
    return row[..., None]


def _row(row: torch.Tensor) -> torch.Tensor:
    return row[..., None, :]


def _read_keys(row: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A sum over keys: [B, H, V]."""
    return (_row(row) @ state).squeeze(-2)


def _magnitude(row: torch.Tensor, state: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    return read.abs().maximum(_read_keys(row.square(), state.square()).sqrt())


def _read_values(state: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """A sum over value features: [B, H, K]."""
    return (state @ _column(row)).squeeze(-1)


def _zero_or(given: torch.Tensor | None, x: Tensors) -> torch.Tensor:
    k, v = x["k"], x["v"]
    shape = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    return k.new_zeros(shape) if given is None else given


def _after(
    state: torch.Tensor,
    sa: torch.Tensor,
    decay: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
) -> torch.Tensor:
    """The state after a step."""
    return (_column(decay) * state).addcmul_(_column(k), _row(v)).addcmul_(_column(b), _row(sa))


def _given(x: Tensors, name: str) -> list[torch.Tensor] | None:
    return list(x[name].unbind(1)) if name in x else None


def _forward(x: Tensors, scale: float, magnitudes: bool) -> dict[str, torch.Tensor]:
    state, given = _zero_or(x.get("initial_state"), x), _given(x, "sa")
    out, read = [], []
    for t, (r, decay, k, v, a, b) in enumerate(zip(*_steps(x, "r decay k v a b"), strict=True)):
        sa = given[t] if given else _read_keys(a, state)
        read.append(_magnitude(a, state, sa) if magnitudes else sa)
        state = _after(state, sa, decay, k, v, b)
        out.append(scale * _read_keys(r, state))
    return {
        "y": _stacked(out, x["v"]),
        "sa": _stacked(read, x["v"]),
        "final_state": state,
    }


def _backward(x: Tensors, scale: float, magnitudes: bool) -> dict[str, torch.Tensor]:
    """The gradients, from the last block of steps to the first; states within a block are
    recomputed.
    """
    rows = list(zip(*_steps(x, "r decay k v a b gy"), strict=True))
    every = max(1, math.isqrt(len(rows)))
    given_sa, given_gsa = _given(x, "sa"), _given(x, "gsa")

    def step(t: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """sa, and the state after the step."""
        _, decay, k, v, a, b, _ = rows[t]
        sa = given_sa[t] if given_sa else _read_keys(a, state)
        return sa, _after(state, sa, decay, k, v, b)

    state, starts = _zero_or(x.get("initial_state"), x), []
    for t in range(len(rows)):
        if t % every == 0:
            starts.append(state)
        state = step(t, state)[1]

    gstate = _zero_or(x.get("gfinal_state"), x)
    made: dict[str, list[torch.Tensor]] = {
        n: [] for n in ("gr", "gdecay", "gk", "gv", "ga", "gb", "sa", "gsa")
    }
    for i in range(len(starts) - 1, -1, -1):
        first, last = i * every, min((i + 1) * every, len(rows))
        states, reads = [starts[i]], []
        for t in range(first, last):
            sa, after = step(t, states[-1])
            states.append(after)
            reads.append(sa)
        for t in range(last - 1, first - 1, -1):
            r, decay, k, v, a, b, gy = rows[t]
            before, sa, g = states[t - first], reads[t - first], scale * gy
            gstate = gstate.addcmul(_column(r), _row(g))
            gsa = given_gsa[t] if given_gsa else _read_keys(b, gstate)
            its = {
                "gr": _read_values(states[t - first + 1], g),
                "gdecay": (before * gstate).sum(-1),
                "gk": _read_values(gstate, v),
                "gv": _read_keys(k, gstate),
                "ga": _read_values(before, gsa),
                "gb": _read_values(gstate, sa),
                "sa": _magnitude(a, before, sa) if magnitudes else sa,
                "gsa": _magnitude(b, gstate, gsa) if magnitudes else gsa,
            }
            for name, y in its.items():
                made[name].append(y)
            gstate = (_column(decay) * gstate).addcmul_(_column(a), _row(gsa))
    like = {"gv": "v", "sa": "v", "gsa": "v"}
    found = {n: _stacked(y[::-1], x[like.get(n, "k")]) for n, y in made.items()}
    return found | {"ginitial_state": gstate}
