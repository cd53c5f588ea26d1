"""What an operator module declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kgen.model.problem import Problem
from kgen.model.signature import Signature

if TYPE_CHECKING:  # light commands (`kgen ops`) list operators without importing torch
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Definition = Callable[[str, Tensors, Mapping[str, float]], dict[str, torch.Tensor]]
    MakeInputs = Callable[
        [str, Problem, str, torch.Generator, torch.device], dict[str, torch.Tensor]
    ]


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


@dataclass(frozen=True, slots=True)
class Dot:
    """An input of the backward pass that autograd has to compute: sum over the last dim of a
    gradient times an output of the forward pass, in fp32.

    Attributes:
        name: The input.
        gradient: Another input of the backward pass.
        output: An output of the forward pass, of the same shape.
        beside: It is wanted where this output of the forward pass is there.
    """

    name: str
    gradient: str
    output: str
    beside: str


@dataclass(frozen=True)
class Gradients:
    """How autograd ties the two passes together, where the names of their tensors do not tell.

    Names tell that a backward input is what the forward pass has under the same name, input or
    output; that `gout` or `dout` is the gradient of `out`. An output of the forward pass that
    has no gradient among the backward inputs is not differentiable.

    Attributes:
        saved: Backward input -> forward tensors, of which the first that a call has is passed on.
        shared: Forward input -> the backward output that is its gradient, too.
        dots: Backward inputs that are computed from gradients.
    """

    saved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    dots: tuple[Dot, ...] = ()


@dataclass(frozen=True)
class Operator:
    """A named computation with its definition.

    Attributes:
        name: Also names the module, the template folder and the search-space file.
        summary: One line.
        source: Where the operator is published.
        doc: Formula and notes, for the generated docstring.
        signature: Dims, dtypes, passes.
        definition: (pass, inputs, scalars) -> outputs, in plain torch, in whatever dtype the
            inputs have: float64 inputs make it the oracle, the problem's dtypes make it the
            eager baseline for the error bound, and float32 inputs tell loss of precision from
            loss of range. Outputs have the dtype of the inputs in the first and last case, and
            of the declared outputs in the second. Tensors whose dtype is `none` are not among
            the inputs; outputs that are not asked for may be returned all the same. Beside the
            scalars it is told which outputs a caller asked for, and which options it chose
            (`arguments`).
        make_inputs: (pass, problem, case, generator, device) -> inputs in the problem's dtypes.
        cases: Names of input cases beyond `normal`, adversarial ones among them.
        cost: (pass, problem) -> least work.
        problems: Default problems (as text) for a GPU, under `cuda`; the key `host` has the small
            ones. A pass may have its own, under `cuda backward` and the like.
        peers: (pass) -> {name: callable(inputs, scalars) -> outputs}; what users run today,
            `eager` among them. Called in the tuning run, beside the winner.
        scale: (pass, float64 inputs, float64 outputs, scalars) -> per-output tensors,
            broadcastable to the outputs: the magnitude that an error is relative to. None:
            max(|y|, rms of y over its last dim).
        aliases: Other names for `--op`.
        slab_dim: A dim along which the outputs that have it are independent, and over which the
            others (a weight's gradient) are sums, so that the oracle can be evaluated in slabs;
            None if there is none. The oracle adds the latter's scales in quadrature.
        repeats: Dims over which the same work is done again, such as batch and heads: the safe
            kernels are certified at few of these, and ragged extents of the others. None: the
            first dims, but for the last three. Small sets have few of them, rather than few
            steps of what the kernel does in turn.
        serial_dims: Those that the definition in fp32 walks along step by step (time): every step
            is a few launches, so that small sets are short.
        widens: Whether the definition computes in fp32 whatever 16-bit dtypes the inputs have, and
            rounds nothing but what it returns: one run of it in fp32 then tells what both lose.
        slow_peers: Names of peers that are run only when asked for, or profiled: a tune would wait
            for them.
        gradients: What autograd cannot tell from the names of the two passes' tensors.
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
    widens: bool = False
    slow_peers: tuple[str, ...] = ()
    gradients: Gradients = Gradients()

    def default_problems(self, pass_name: str, on_host: bool) -> tuple[str, ...]:
        """The problems that a pass is tuned for unless told otherwise."""
        device = "host" if on_host else "cuda"
        return self.problems.get(f"{device} {pass_name}", self.problems[device])

    def arguments(self, pass_name: str, problem: Problem) -> dict[str, float]:
        """What a call gives besides tensors: the scalars; for each output that must be asked for,
        `return_<output>`: 1 if it is, else 0; of each option `<option>=<choice>`: 1.
        """
        declared = self.signature.pass_named(pass_name)
        there = problem.present(declared).outputs
        asked = self.signature.asked_for(declared)
        wanted = {f"return_{o.name}": float(o in there) for o in asked}
        chosen = {f"{name}={choice}": 1.0 for name, choice in self.options(problem).items()}
        return self.scalars(pass_name) | wanted | chosen

    def options(self, problem: Problem) -> dict[str, str]:
        """What a problem chooses for each option."""
        choices = dict(problem.dtypes)
        return {option.name: choices[option.name] for option in self.signature.options}

    def scalars(self, pass_name: str) -> dict[str, float]:
        """Default values of a pass's scalars."""
        declared = self.signature.pass_named(pass_name).scalars
        return {s.name: s.default for s in declared}
