"""Text of problems, explanations and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from .rows import PREDICTED, Call
from .signature import PassSignature

# The lookup key holds each pointer modulo this many bytes. No condition of a row needs more.
ALIGNMENT = 32


class Explanation(NamedTuple):
    """The kernel that serves a problem, and the evidence for it; `print` shows all of it.

    `step` is the dispatch step (`selection.py`). `path` and `learnt_from` are set for the step
    `learnt`: the comparisons of the rule, and its evidence. `template` is set for the step
    `family`, which renders and compiles its kernel at the first call; `begun` is the config that
    was adapted: that of a row, or, without a `record`, the fastest of a search. `ranked_from` is
    the number of problems from which the model that ranked the configs was learnt; 0: there is no
    model, or the step needs none.
    """

    function: str
    problem: str
    gpu: str
    same_gpu: bool
    step: str
    config: str
    kernel: str
    evidence: str
    tuned_problem: str = ""
    record: str = ""
    median_us: float | None = None
    path: str = ""
    learnt_from: str = ""
    template: str = ""
    begun: str = ""
    ranked_from: int = 0

    def __repr__(self) -> str:
        where = self.gpu if self.same_gpu else f"{self.gpu} (same architecture)"
        lines = [f"{self.function}({self.problem}) on {where}: {self.step}",
                 f"  kernel    {self.config}, "
                 + (f"rendered from {self.template}" if self.template
                    else f"kernels/{self.kernel}.cu")]
        if self.path:
            lines += [f"  rule      {self.path}", f"            {self.learnt_from}"]
        if self.ranked_from:
            lines.append("  ranking   the first of the configs that may serve, by a model learnt "
                         f"from {self.ranked_from} recorded problems")
        if self.template:
            lines.append("  evidence  family: this problem was not measured; "
                         + (f"the config {'is' if self.begun == self.config else 'began as'} "
                            + (f"that of record {self.record}:" if self.record
                               else f"the fastest of a search of {self.tuned_problem}")
                            if self.begun else "a search would try this config first"))
            if self.begun != self.config and self.begun:
                lines.append(f"            {self.begun}")
            if self.median_us is not None:
                how = "predicted" if PREDICTED in self.evidence else "tuned"
                lines.append(f"            {self.median_us:.2f} us at {self.tuned_problem}, "
                             f"where it was {how}")
        elif self.median_us is None:
            lines.append(f"  evidence  {self.evidence}")
        elif self.evidence == PREDICTED:
            lines += [f"  evidence  {PREDICTED}, not measured: about {self.median_us:.2f} us at "
                      f"{self.tuned_problem}, record {self.record}",
                      "            verified on the CPU; the first measured tune replaces it"]
        else:
            lines.append(f"  evidence  {self.evidence}: {self.median_us:.2f} us at "
                         f"{self.tuned_problem}, record {self.record}")
        return "\n".join(lines)


def contiguous_call(signature: PassSignature, dims: Mapping[str, int]) -> Call:
    """Return the numbers of a call whose tensors are contiguous and aligned."""
    strides: dict[str, int] = {}
    for argument in (*signature.inputs, *signature.outputs):
        step = 1
        for name in reversed(argument.dims):
            if name in argument.free_strides:
                strides[f"{argument.name}_stride_{name}"] = step
            step *= dims.get(name, 1)  # `N + 1` is not in `dims`; such vectors have no free strides
    pointers = {f"{a.name}_ptr": 0 for a in (*signature.inputs, *signature.outputs)}
    return Call(**dims, **strides, **pointers)


def problem_text(signature: PassSignature, dims: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
    """The problem in the form of `kgen tune --problem`: `M=8,N=16,dtype=fp32`."""
    pairs = [
        *zip((dim.name for dim in signature.dims), dims, strict=True),
        *zip((f.name for f in signature.choices), dtypes, strict=True),
    ]
    return ",".join(f"{name}={value}" for name, value in pairs)


def not_loaded(library: str, operator: str, pass_name: str, problem: str,
               device: torch.device) -> str:
    """The error of a call whose kernel would have to be loaded while a CUDA graph is captured.

    Args:
        library: The library's name in Python.
        operator: The operator.
        pass_name: The pass.
        problem: The problem, from `problem_text`.
        device: The device.
    """
    arguments = [f'"{operator}"', *([] if pass_name == "forward" else [f'pass_name="{pass_name}"'])]
    for name, _, value in (pair.partition("=") for pair in problem.split(",")):
        arguments.append(f"{name}={value}" if value.isdigit() else f'{name}="{value}"')
    return (
        f"{operator} {pass_name}: a CUDA graph is being captured, and the kernel for {problem} on "
        f"{device} is not loaded yet\n  next: before the capture, call it once with such tensors, "
        f"or run {library}.warmup({', '.join(arguments)}, device=\"{device}\")"
    )
