"""The declaration of an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kgen.model.problem import Problem
from kgen.model.signature import Signature
from kgen.runtime.signature import Dot

if TYPE_CHECKING:  # light commands (`kgen ops`) list operators without importing torch
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Definition = Callable[[str, Tensors, Mapping[str, float]], dict[str, torch.Tensor]]
    MakeInputs = Callable[
        [str, Problem, str, torch.Generator, torch.device], dict[str, torch.Tensor]
    ]
    Trained = Callable[[str, Problem, Tensors, torch.Generator], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work of one call.

    Attributes:
        bytes: Device memory traffic with every input read once and every output written once.
        flops: Floating-point operations (a multiply-add counts 2).
        unit: The fastest unit that can do them at the problem's accuracy: `fp32`, plain FMAs;
            `3xhalf`, tensor cores with each product as three of fp16, which keeps fp32's accuracy
            (decision 0013);
            `tf32`, tensor cores with fp32 inputs rounded to TF32;
            `half`, tensor cores with fp16 or bf16 inputs.
    """

    bytes: int
    flops: int
    unit: Literal["fp32", "3xhalf", "tf32", "half"] = "fp32"


@dataclass(frozen=True)
class Gradients:
    """The connection of the two passes for autograd, where tensor names do not already define it.

    By default a backward input is the forward tensor of the same name, and `gout` or `dout` is the
    gradient of `out`. A forward output without a gradient among the backward inputs is not
    differentiable.

    Attributes:
        saved: Backward input -> forward tensors; autograd passes the first one that is present.
        shared: Forward input -> the backward output that is also its gradient.
        dots: Backward inputs that are computed from gradients.
    """

    saved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    dots: tuple[Dot, ...] = ()


@dataclass(frozen=True)
class Operator:
    """A named computation with its definition.

    Attributes:
        name: The operator's name, which is also that of its module, template folder and
            search-space file.
        summary: A description in one line.
        source: Where the operator is published.
        doc: Formula and notes, for the generated docstring.
        signature: Dims, dtypes, passes.
        definition: (pass, inputs, scalars) -> outputs, in plain torch, in the dtype of the inputs.
            With float64 inputs it is the oracle; with the problem's dtypes it is the eager baseline
            of the error bound, and outputs have the declared dtypes; float32 inputs separate loss
            of precision from loss of range. Tensors whose dtype is `none` are not among the inputs;
            unrequested outputs may be returned. `scalars` also contains the requested outputs and
            the chosen options (`arguments`).
        make_inputs: (pass, problem, case, generator, device) -> inputs in the problem's dtypes.
        cases: Names of input cases beyond `normal`, including adversarial ones.
        cost: (pass, problem) -> least work.
        problems: Default problems (as text): `cuda` for a GPU, `host` small ones for the CPU. A
            pass may have its own, for instance under `cuda backward`.
        peers: (pass) -> {name: callable(inputs, scalars) -> outputs}: competitors, including
            `eager`, which are timed together with the winner.
        scale: (pass, float64 inputs, float64 outputs, scalars) -> per-output tensors,
            broadcastable to the outputs: the magnitude to which an error is relative. None:
            max(|y|, rms of y over its last dim).
        aliases: Other names for `--op`.
        slab_dim: A dim along which outputs that have it are independent, and over which outputs
            that lack it (a weight's gradient) are sums, so that the oracle can be evaluated in
            slabs; None if there is none. The oracle adds the scales of such sums in quadrature.
        repeats: Dims that repeat the same work, such as batch and heads. Safe kernels are certified
            at small extents of these and ragged extents of the others. None: all dims except the
            last three. Small input sets reduce these dims, not the steps that a kernel takes in
            sequence.
        serial_dims: Dims over which the definition in fp32 iterates step by step (time). Each step
            takes a few launches, so small input sets have small extents in these dims.
        head_dims: Dims that are the features of a head, which are few in every call. Certificates
            test larger extents than the tuned problem's, but not thousands as in other dims.
        widens: Whether the definition computes in fp32 for 16-bit inputs and rounds only its
            outputs. One run in fp32 then yields both losses.
        slow_peers: Names of peers that run only on request or in a profile, because a tune would
            wait for them.
        gradients: The gradient connections that the tensors' names do not define.
        untouched: (pass, inputs) -> {in-out tensor: bool tensor, broadcastable to it}: a mask of
            the elements that a call must leave unchanged, bit by bit. None: no such elements.
        trained: (pass, problem, inputs of the case `normal`, generator) -> those inputs that
            differ in a trained model, with the same shapes and dtypes. Kernels and peers are timed
            on both, and the slower time counts (decision 0041). Its docstring gives the sources of
            the distributions. They are only used for timing: no verdict depends on them, and
            changing them makes no record invalid. None: only `normal` is timed.
    """

    name: str
    summary: str
    source: str
    doc: str
    signature: Signature
    definition: Definition
    make_inputs: MakeInputs
    cases: tuple[str, ...]
    cost: Callable[[str, Problem], Cost]
    problems: Mapping[str, tuple[str, ...]]
    peers: Callable[[str], Mapping[str, Callable[[Tensors, Mapping[str, float]], object]]]
    scale: (
        Callable[[str, Tensors, Tensors, Mapping[str, float]], dict[str, torch.Tensor]] | None
    ) = None
    aliases: tuple[str, ...] = ()
    slab_dim: str | None = None
    repeats: tuple[str, ...] = ()
    serial_dims: tuple[str, ...] = ()
    head_dims: tuple[str, ...] = ()
    widens: bool = False
    slow_peers: tuple[str, ...] = ()
    gradients: Gradients = Gradients()
    untouched: Callable[[str, Tensors], dict[str, torch.Tensor]] | None = None
    trained: Trained | None = None

    def default_problems(self, pass_name: str, on_host: bool) -> tuple[str, ...]:
        """The problems for which a pass is tuned by default."""
        device = "host" if on_host else "cuda"
        return self.problems.get(f"{device} {pass_name}", self.problems[device])

    def arguments(self, pass_name: str, problem: Problem) -> dict[str, float]:
        """The arguments of a call besides tensors.

        These are the scalars; `return_<output>`, 1 or 0, for each output on request; and
        `<option>=<choice>`: 1 for each option.
        """
        declared = self.signature.pass_named(pass_name)
        there = problem.present(declared).outputs
        asked = self.signature.asked_for(declared)
        wanted = {f"return_{o.name}": float(o in there) for o in asked}
        chosen = {f"{name}={choice}": 1.0 for name, choice in self.options(problem).items()}
        return self.scalars(pass_name) | wanted | chosen

    def options(self, problem: Problem) -> dict[str, str]:
        """The choice of each option in a problem."""
        choices = dict(problem.dtypes)
        return {option.name: choices[option.name] for option in self.signature.options}

    def scalars(self, pass_name: str) -> dict[str, float]:
        """Default values of a pass's scalars."""
        declared = self.signature.pass_named(pass_name).scalars
        return {s.name: s.default for s in declared}
