"""Binds candidates to tensors, and makes the buffer sets that timed calls rotate through."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from kgen.launch import Module
from kgen.measure.memory import cache_state, sets_for
from kgen.model.expr import Names
from kgen.model.gpu import GpuProfile
from kgen.model.plan import Plan, make_plan
from kgen.model.problem import Problem
from kgen.model.signature import Pass
from kgen.operators.base import Operator
from kgen.worker.messages import Candidate

Tensors = dict[str, torch.Tensor]
Call = Callable[[], None]

# Shared memory of a CTA on the host layer, equal to kMaxSmemBytes in kgen/host/thread.hpp: that of
# a whole SM on the GPUs with the most shared memory.
HOST_SMEM_BYTES = 233472


def bind(
    module: Module,
    candidate: Candidate,
    operator: Operator,
    gpu: GpuProfile,
    pass_name: str,
    problem: Problem,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, float],
) -> Call:
    """Bind a candidate to tensors, whose extents may differ from the problem's.

    Args:
        module: The candidate's loaded module.
        candidate: The candidate whose launches are planned.
        operator: The operator.
        gpu: The GPU that runs the candidate.
        pass_name: `forward` or `backward`.
        problem: Gives the dtypes, and the extents of dims that no tensor has.
        tensors: Inputs, outputs and workspaces by name, without those that the problem leaves out.
        scalars: All scalars of the pass by name.
    Raises:
        LaunchError: If the tensors are not what the kernels take.
    """
    numbers = {**_numbers(operator, pass_name, problem, tensors), **scalars}
    dims = tuple((name, int(numbers[name])) for name, _ in problem.dims)
    its_own = Problem(dims, problem.dtypes)
    plan = make_plan(candidate.variant, candidate.config, its_own, gpu)
    pass_ = operator.signature.pass_named(pass_name)
    module.constant = frozenset(t.name for t in pass_.inputs if not t.in_out)
    return module.bind(plan, {**_absent(operator, pass_name, problem), **tensors}, numbers)


def bind_sets(
    module: Module,
    plan: Plan,
    operator: Operator,
    pass_name: str,
    problem: Problem,
    sets: Sequence[Tensors],
    scratch: Tensors,
) -> list[Call]:
    """Bind a candidate to each of a problem's buffer sets.

    Args:
        module: The candidate's loaded module.
        plan: The plan of the candidate, for the problem.
        operator: The operator.
        pass_name: `forward` or `backward`.
        problem: The problem of the sets.
        sets: From `buffer_sets`.
        scratch: From `shared_scratch`.
    Returns:
        One call per set.
    Raises:
        LaunchError: If the tensors are not what the kernels take.
    """
    absent = _absent(operator, pass_name, problem)
    numbers: dict[str, int | float] = {}
    calls = []
    for tensors in sets:
        # Computed once, because all sets have the same extents and strides, and may be hundreds.
        numbers = numbers or _numbers(operator, pass_name, problem, tensors)
        calls.append(module.bind(plan, {**absent, **tensors, **scratch}, numbers))
    return calls


def shared_scratch(plan: Plan, problem: Problem, device: torch.device) -> Tensors:
    """Allocate a plan's workspaces, by name.

    All sets share them, as consecutive calls share scratch memory with a caching allocator.
    """
    return {
        w.name: torch.empty(w.elements, dtype=_torch_dtype(problem, w.dtype), device=device)
        for w in plan.workspaces
    }


def buffer_sets(
    operator: Operator,
    gpu: GpuProfile,
    pass_name: str,
    problem: Problem,
    l2: str,
    seed: int,
    device: torch.device,
) -> tuple[list[Tensors], str]:
    """Make buffer sets of a problem's inputs and outputs; with a cold L2, enough to exceed L2.

    Args:
        operator: The operator; its `make_inputs` draws the inputs.
        gpu: The GPU that will use them.
        pass_name: `forward` or `backward`.
        problem: The problem.
        l2: `cold` or `warm`; see `sets_for`.
        seed: The seed of the inputs.
        device: Where to allocate them.
    Returns:
        The sets, and the state of the cache at the start of a call: see `cache_state`.
    """
    pass_ = problem.present(operator.signature.pass_named(pass_name))
    bytes_per_set = sum(
        math.prod(problem.shape(t.dims)) * problem.dtype(t.dtype).itemsize for t in pass_.tensors
    )
    memory = gpu.memory_bytes
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[0]
    # A call may touch only a part of an in-out tensor, such as some slots of a large pool of
    # states; the operator's cost counts only that part.
    touched = operator.cost(pass_name, problem).bytes if pass_.in_outs else bytes_per_set
    # Trained inputs, if there are any, take as many sets again.
    share = 2 if operator.trained is None else 4
    limit = memory // share * touched // max(bytes_per_set, 1)
    count = sets_for(l2, touched, gpu.l2_bytes, limit)
    generator = torch.Generator(device=device).manual_seed(seed)
    sets = []
    for _ in range(count):
        tensors: Tensors = dict(
            operator.make_inputs(pass_name, problem, "normal", generator, device)
        )
        for output in pass_.outputs:
            tensors[output.name] = torch.empty(
                problem.shape(output.dims),
                dtype=_torch_dtype(problem, output.dtype),
                device=device,
            )
        sets.append(tensors)
    return sets, cache_state(count, touched, gpu.l2_bytes)


def admission(
    candidate: Candidate, gpu: GpuProfile, pass_: Pass
) -> Callable[[Mapping[str, int | str], Mapping[str, torch.Tensor]], bool]:
    """Return a function (numbers, tensors) -> whether a candidate can run such a call.

    It can if the variant's guards hold and no launch needs more shared memory than a CTA can have.
    """
    most_smem_bytes = HOST_SMEM_BYTES if gpu.is_host else gpu.smem_per_block
    smems = [launch.smem for launch in candidate.variant.launches]
    guards = [rule.condition for rule in candidate.variant.guards]
    lets = dict(candidate.variant.lets)
    fixed: dict[str, object] = {**gpu.names, **candidate.variant.values(candidate.config)}

    def admits(numbers: Mapping[str, int | str], tensors: Mapping[str, torch.Tensor]) -> bool:
        pointers = dict.fromkeys((f"{t.name}_ptr" for t in pass_.tensors), 0)
        pointers |= {f"{name}_ptr": t.data_ptr() for name, t in tensors.items()}
        env = Names({**fixed, **numbers, **pointers}, lets)
        return all(guard(env) for guard in guards) and all(
            int(smem(env)) <= most_smem_bytes for smem in smems
        )

    return admits


def _absent(operator: Operator, pass_name: str, problem: Problem) -> dict[str, None]:
    """The tensors that a problem leaves out."""
    pass_ = operator.signature.pass_named(pass_name)
    present = problem.present(pass_).tensors
    return {t.name: None for t in pass_.tensors if t not in present}


def _numbers(
    operator: Operator, pass_name: str, problem: Problem, tensors: Mapping[str, torch.Tensor]
) -> dict[str, int | float]:
    """Scalars, dims and strides of a call, by the names of the kernels' parameters."""
    pass_ = operator.signature.pass_named(pass_name)
    numbers: dict[str, int | float] = {**operator.scalars(pass_name), **dict(problem.dims)}
    for declared in pass_.tensors:
        tensor = tensors.get(declared.name)
        for i, dim in enumerate(declared.dims):
            if tensor is not None and not dim.isdigit():
                name = dim.removesuffix(" + 1")
                numbers[name] = tensor.shape[i] - (name != dim)
            if dim in declared.free_strides:
                stride = 0 if tensor is None else tensor.stride(i)
                numbers[f"{declared.name}_stride_{dim}"] = stride
    implied = operator.signature.implied(dict(problem.dtypes))
    if implied is not None:
        numbers[implied[0]] = numbers.get(implied[1], 1)
    return numbers


def _torch_dtype(problem: Problem, name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, problem.dtype(name).torch)
    return dtype
