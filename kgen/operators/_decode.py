"""The common parts of decode operators: states in a pool, one slot per sequence, updated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kgen.model.problem import Problem
from kgen.model.signature import (
    Dim,
    DTypeField,
    Option,
    Pass,
    Scalar,
    Signature,
    Tensor,
)
from kgen.operators._shared import moved_bytes
from kgen.operators.base import Cost

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Define = Callable[[str, Tensors, Mapping[str, float]], dict[str, torch.Tensor]]
    Scale = Callable[[str, Tensors, Tensors, Mapping[str, float]], dict[str, torch.Tensor]]
    Peer = Callable[[Tensors, Mapping[str, float]], object]
    Function = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    Arguments = Callable[[Tensors, Mapping[str, float]], tuple[object, ...]]

STEP = ("B", "T", "H")
INDICES = "state_indices_dtype=int64"

# The cases of the recurrence, without those that need sums over many steps.
CASES = (
    "huge", "extreme_decay", "no_decay", "rare_decays", "mixed", "nonfinite", "skipped",
    "out_of_range",
)

_POOL = Tensor(
    "state_pool", ("S", "H", "K", "V"), "fp32", free_strides=("S", "H", "K", "V"), in_out=True,
    doc="fp32; updated in place: the states after the last step overwrite the states before the "
    "first step. Any strides, so that a pool [S, H, V, K] is passed as "
    "state_pool.transpose(-1, -2). It must not share memory with another argument.",
)
_SLOTS = Tensor(
    "state_indices", ("B",), "state_indices_dtype",
    doc="int32 or int64, the slot of each sequence; None: sequence n has slot n. A negative index "
    "skips its sequence: its y is 0, and no state is read or written. For an index of S or more "
    "its y is NaN, and no state is read or written. Two sequences must not have the same slot; the "
    "contents of a shared slot and y are undefined. The values stay on the device, so that a CUDA "
    "graph may be replayed with other values.",
)

DOC = """\
S_0 is the state in the sequence's slot of state_pool, and S_T overwrites it."""


def rows(name: str, features: str, doc: str, dtype: str = "dtype", layout_of: str = "") -> Tensor:
    """One row of features per step; the caller chooses the strides of B, T and H."""
    return Tensor(name, (*STEP, features), dtype, free_strides=STEP, layout_of=layout_of, doc=doc)


def signature(
    inputs: tuple[Tensor, ...], fields: tuple[DTypeField, ...], decay_form: Option
) -> Signature:
    """Dims, dtypes and the one pass.

    Args:
        inputs: The inputs of the recurrence, without states.
        fields: The dtype fields of the inputs.
        decay_form: The option for the decay form of the recurrence.
    """
    return Signature(
        dims=(
            Dim("B", "sequences"),
            Dim("S", "slots of the pool", like="B"),
            Dim("T", "time steps"),
            Dim("H", "heads"),
            Dim("K", "key features", smallest=1),
            Dim("V", "value features", smallest=1, like="K", both="D"),
        ),
        dtypes=(
            *fields, DTypeField("state_indices_dtype", ("none", "int32", "int64"), default="none"),
        ),
        options=(decay_form,),
        passes=(
            Pass(
                "forward",
                inputs=(*inputs, _POOL, _SLOTS),
                outputs=(rows("y", "V", "dtype and layout of v.", layout_of="v"),),
                scalars=(Scalar("scale", 1.0, doc="Factor of y; often 1 or K ** -0.5."),),
            ),
        ),
    )


def slots_of(inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot of each sequence, whether that slot exists in the pool)."""
    import torch

    pool, given = inputs["state_pool"], inputs.get("state_indices")
    if given is None:
        given = torch.arange(inputs["r"].shape[0], device=pool.device)
    slots = given.long()
    return slots, (slots >= 0) & (slots < pool.shape[0])


def untouched(pass_name: str, inputs: Tensors) -> dict[str, torch.Tensor]:
    """The slots of the pool that belong to no sequence."""
    import torch

    pool = inputs["state_pool"]
    slots, used = slots_of(inputs)
    free = torch.ones(pool.shape[0], 1, 1, 1, dtype=torch.bool, device=pool.device)
    free[slots[used]] = False
    return {"state_pool": free}


def decoded(
    define: Define, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The outputs of decoding, computed by the recurrence's definition (forward, with states)."""
    import torch

    made = define("forward", _with_states(inputs), scalars)
    slots, used = slots_of(inputs)
    of_rest = torch.where(slots < 0, 0.0, torch.nan).to(made["y"].dtype)
    pool = inputs["state_pool"].clone()
    pool[slots[used]] = made["final_state"][used].to(pool.dtype)
    y = torch.where(used.view(-1, 1, 1, 1), made["y"], of_rest.view(-1, 1, 1, 1))
    return {"y": y, "state_pool": pool}


def scaled(
    of: Scale, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The scales of decoding, from the recurrence's `scale`.

    For y of a skipped sequence it is 0, for a slot that no sequence has the magnitude of its state.
    """
    import torch

    slots, used = slots_of(inputs)
    its = _with_states(inputs)
    states = torch.zeros_like(its["initial_state"])
    states[used] = outputs["state_pool"][slots[used]]
    found = of("forward", its, {"y": outputs["y"], "final_state": states}, scalars)
    pool = outputs["state_pool"].abs()
    pool[slots[used]] = found["final_state"][used]
    return {"y": torch.where(used.view(-1, 1, 1, 1), found["y"], 0.0), "state_pool": pool}


def _with_states(inputs: Tensors) -> dict[str, torch.Tensor]:
    """The inputs of the recurrence: a state per sequence; 0 for a sequence without a slot."""
    import torch

    pool = inputs["state_pool"]
    slots, used = slots_of(inputs)
    states = torch.zeros(
        slots.shape[0], *pool.shape[1:], dtype=pool.dtype, device=pool.device
    )
    states[used] = pool[slots[used]]
    its = {n: x for n, x in inputs.items() if n not in ("state_pool", "state_indices")}
    return its | {"initial_state": states}


def whole_problem(problem: Problem) -> Problem:
    """The problem of the recurrence: a batch row per sequence, without states."""
    dims = [(name, extent) for name, extent in problem.dims if name != "S"]
    dtypes = [(name, chosen) for name, chosen in problem.dtypes if name != "state_indices_dtype"]
    absent = [(f"{name}_dtype", "none") for name in ("initial_state", "final_state", "cu_seqlens")]
    return Problem((*dims, ("N", problem.dim("B"))), (*dtypes, *absent))


def drawn_slots(
    problem: Problem, case: str, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw a pool, and the slots of the sequences in random order.

    If there are fewer slots than sequences, the others have a negative index. `skipped` has
    negative indices between the others, `out_of_range` has indices >= S; both have some whose last
    32 bits are a slot's number. `nonfinite` fills a slot
    of no sequence with NaN, if there is one, and plants a NaN in the state of the first sequence.
    """
    import torch

    b, s, h, k, v = problem.shape(("B", "S", "H", "K", "V"))
    pool = torch.randn(s, h, k, v, generator=generator, device=device)
    slots = torch.full((b,), -1, device=device)
    order = torch.randperm(s, generator=generator, device=device)
    slots[: min(b, s)] = order[:b]
    if case == "nonfinite" and s and h:
        pool[slots[0] if b else 0, 0, k // 2, v // 2] = torch.nan
        pool[order[b:][:1]] = torch.nan
    if problem.dtype("state_indices_dtype").itemsize == 0:
        return {"state_pool": pool}
    dtype = getattr(torch, problem.dtype("state_indices_dtype").torch)
    if case == "skipped":
        slots[::3], slots[1::5] = -1, torch.iinfo(dtype).min
        if dtype == torch.int64:
            slots[2::5] -= 2**32
    if case == "out_of_range":
        slots[::3], slots[1::5] = s, torch.iinfo(dtype).max
        if dtype == torch.int64:
            slots[2::5] += 2**32
    return {"state_pool": pool, "state_indices": slots.to(dtype)}


def least_work(declared: Signature, products: int, problem: Problem) -> Cost:
    """The work of moving every row once, and of reading and writing the used states once.

    Args:
        declared: The signature of the operator.
        products: Multiply-adds per element of a state and step.
        problem: The problem.
    """
    b, s, t, h, k, v = problem.shape(("B", "S", "T", "H", "K", "V"))
    pool = 4 * s * h * k * v
    states = 4 * min(b, s) * h * k * v
    moved = moved_bytes(declared.pass_named("forward"), problem) - pool + 2 * states
    return Cost(bytes=moved, flops=2 * products * b * t * h * k * v, unit="fp32")


def stateful(function: Function, arguments: Arguments) -> Peer:
    """A peer that gathers states from the pool, calls a function, and scatters the new states.

    Args:
        function: Returns y and the states after the last step.
        arguments: Returns the function's arguments from the recurrence's inputs and scalars.
    """
    def peer(inputs: Tensors, scalars: Mapping[str, float]) -> object:
        pool, slots = inputs["state_pool"], inputs.get("state_indices")
        states = pool[: inputs["r"].shape[0]] if slots is None else pool.index_select(0, slots)
        y, new = function(*arguments({**inputs, "initial_state": states}, scalars))
        assert new is not None
        if slots is None:
            states.copy_(new)
        else:
            pool.index_copy_(0, slots.long(), new)
        return y, pool

    return peer
