"""Which row serves a call: the table of its device, and the ladder down that table.

The ladder: the very problem that was tuned; else what the rule of these dtypes and compiled-in dims
chooses, which was learnt from measurements (`rules.py`); else the nearest tuned problem whose
compiled-in dims and dtypes are the call's and whose conditions hold (where products may be rounded:
else one that does not round them); else the operator's safe variant. The
table is the device's own, else that of a GPU of the same architecture. Nothing ever falls back
to eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

import torch

from .arguments import ROUNDS, Signature
from .problems import Explanation, problem_text
from .rows import Call, Gpu, Row, Rule, SafeRow, distance
from .rules import covering, evidence_text, first_fitting, path_text


class DispatchError(RuntimeError):
    """No kernel of the library serves the call."""


class Choice(NamedTuple):
    """What the ladder arrived at: a row and the step it stands on."""

    step: str  # "exact", "learnt", "nearest", "safe"
    row: Row | SafeRow
    rule: Rule | None = None  # of "learnt"


class Table(NamedTuple):
    """Rows for one device, and whose they are."""

    gpu: Gpu | None
    same_gpu: bool
    rows: tuple[Row, ...]
    rules: tuple[Rule, ...]
    facts: Mapping[str, int]


def lender(
    function: str, operator: str, gpus: Sequence[Gpu], device: torch.device
) -> tuple[Gpu | None, bool, Mapping[str, int]]:
    """Find the GPU whose rows serve a device: its own model, else its nearest kin.

    Args:
        function: Of the pass, as people call it; for errors.
        operator: The operator; for errors.
        gpus: That the operator was tuned for.
        device: Where the call runs.
    Returns:
        The GPU, None if there is no such one; whether it is the device's own model; the facts of
        the device itself.
    Raises:
        DispatchError: If the library has no kernel for the device.
    """
    if device.type == "cpu":
        host = next((gpu for gpu in gpus if gpu.arch == "host"), None)
        if host is None:
            tuned = ", ".join(gpu.name for gpu in gpus) or "nothing"
            raise DispatchError(
                f"{function}: this is a CPU tensor, but only {tuned} was tuned\n"
                f"  run: kgen tune --op {operator} --gpu host, or move the tensors"
            )
        return host, True, host.facts
    if device.type != "cuda":
        raise DispatchError(f"{function}: tensors on {device} are not served; "
                            "move them to a CUDA GPU")
    # Compilers and the driver are only needed from here on; importing them takes 10 ms.
    from .device import device_facts

    facts = device_facts(device)
    name = torch.cuda.get_device_name(device)
    for gpu in gpus:
        if name in gpu.device_names:
            return gpu, True, facts
    kin = [gpu for gpu in gpus if gpu.compute_capability == facts["compute_capability"]]
    if kin:
        nearest = min(kin, key=lambda g: abs(g.facts["sm_count"] - facts["sm_count"]))
        return nearest, False, facts
    return None, False, facts


def choose(
    signature: Signature, operator: str, table: Table,
    safe_rows: Callable[[], Iterable[SafeRow]],
    dims: tuple[int, ...], dtypes: tuple[str, ...], call: Call,
) -> Choice:
    """Walk down the ladder to the row that serves a call.

    Args:
        signature: Of the pass.
        operator: The operator; for the error.
        table: Of the device.
        safe_rows: Loads the safe kernels of the pass; only the last step asks for them.
        dims: Extents, in the signature's order.
        dtypes: Likewise; options, too.
        call: The numbers that conditions are decided from.
    Raises:
        DispatchError: If not even a safe kernel serves these dtypes.
    """
    choice = measured(signature, table, dims, dtypes, call)
    if choice is not None:
        return choice
    # Products that may be rounded need not be.
    plain = tuple(ROUNDS.get(name, name) for name in dtypes)
    choice = measured(signature, table, dims, plain, call) if plain != dtypes else None
    if choice is not None:
        return choice if choice.step == "learnt" else choice._replace(step="nearest")
    for candidate in safe_rows():
        if candidate.dtypes == dtypes:
            return Choice("safe", candidate)
    problem = problem_text(signature, dims, dtypes)
    raise DispatchError(
        f"{signature.function}: the library has no kernel for {problem}\n"
        f"  run: kgen tune --op {operator} --problem {problem}"
    )


def measured(
    signature: Signature, table: Table, dims: tuple[int, ...], dtypes: tuple[str, ...], call: Call
) -> Choice | None:
    """Return the measured row for a call: of its very problem, learnt, or the nearest one's."""
    nearest: Row | None = None
    least = inf
    for row in table.rows:
        if row.dtypes != dtypes or not _same_constants(signature, row, dims):
            continue
        far = distance(dims, row.dims)
        if far < least and row.fits(call):
            nearest, least = row, far
    if nearest is None:
        return None
    if nearest.dims == dims:
        return Choice("exact", nearest)
    names = (dim.name for dim in signature.dims)
    rule = covering(table.rules, dict(zip(names, dims, strict=True)), dtypes)
    learnt = None if rule is None else first_fitting(rule, table.rows, call)
    return Choice("nearest", nearest) if learnt is None else Choice("learnt", learnt, rule)


def _same_constants(signature: Signature, row: Row, dims: tuple[int, ...]) -> bool:
    return all(
        extent == tuned
        for dim, extent, tuned in zip(signature.dims, dims, row.dims, strict=True)
        if dim.name in row.constants
    )


def explanation(
    signature: Signature, table: Table, choice: Choice,
    dims: Mapping[str, int], dtypes: tuple[str, ...], where: str,
) -> Explanation:
    """Say what the ladder arrived at, and on what evidence.

    Args:
        signature: Of the pass.
        table: That the choice was made from.
        choice: What `choose` returned.
        dims: Extents by name, in the signature's order.
        dtypes: Likewise; options, too.
        where: Names the device if no GPU lends it rows.
    """
    row = choice.row
    told = Explanation(
        function=signature.function,
        problem=problem_text(signature, tuple(dims.values()), dtypes),
        gpu=table.gpu.name if table.gpu else where,
        same_gpu=table.same_gpu,
        step=choice.step,
        config=row.config,
        kernel=row.kernel,
        evidence="right for every problem, tuned for none",
    )
    if isinstance(row, SafeRow):
        return told._replace(same_gpu=True)
    told = told._replace(
        evidence=row.evidence, record=row.record, median_us=row.median_us,
        tuned_problem=problem_text(signature, row.dims, row.dtypes),
    )
    if choice.rule is None:
        return told
    return told._replace(
        path=path_text(choice.rule, dims, row.record),
        learnt_from=evidence_text(choice.rule),
    )
