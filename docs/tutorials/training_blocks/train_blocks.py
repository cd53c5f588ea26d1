"""Train two small blocks with kgen_ops and with eager PyTorch; print their losses side by side.

    pip install ./generated
    python docs/tutorials/training_blocks/train_blocks.py [--device cuda] [--steps 20]

The tutorial is docs/tutorials/training-blocks.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import eager_operators
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from model_blocks import LanguageModel, Operators, Sizes, rwkv6, transformer
from torch import Tensor

BLOCKS = {"transformer": transformer, "rwkv6": rwkv6}
EAGER, LIBRARY = "eager", "kgen_ops"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNTIMED = 0.5  # of the steps: kernels are loaded and compiled in the first ones


@dataclass(frozen=True)
class Plan:
    """How to train.

    Attributes:
        sizes: Of the model.
        steps: Optimizer steps.
        device: Where.
        dtype: Of parameters and activations.
        backend: Of torch.compile.
        seed: Of parameters and data.
    """

    sizes: Sizes
    steps: int
    device: torch.device
    dtype: torch.dtype
    backend: str = "inductor"
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """What one training did.

    Attributes:
        losses: One per step.
        step_ms: Wall time of a step once all is loaded; None on a CPU, where it says nothing.
    """

    losses: tuple[float, ...]
    step_ms: float | None


@dataclass(frozen=True)
class Comparison:
    """One block, trained in several ways.

    Attributes:
        runs: By name, eager PyTorch first.
        refused: What the library could not serve, in its own words.
    """

    runs: dict[str, Run]
    refused: dict[str, str]

    @property
    def differences(self) -> dict[str, float]:
        """The largest difference of a run's losses from eager PyTorch's."""
        eager = self.runs[EAGER].losses
        return {
            name: max(abs(a - b) for a, b in zip(run.losses, eager, strict=True))
            for name, run in self.runs.items()
        }


def library_operators() -> Operators:
    """The operators of the installed library.

    Raises:
        ImportError: If there is none.
    """
    import kgen_ops

    def absent(name: str) -> Callable[..., Any]:
        def refuse(*_: object) -> Any:
            raise NotImplementedError(
                f"the library has no {name}\n  run: kgen tune --op {name} --gpu auto"
            )

        return refuse

    return Operators(*(getattr(kgen_ops, n, None) or absent(n) for n in ("rmsnorm", "wkv6")))


def batch_of(plan: Plan, step: int) -> Tensor:
    """Tokens [B, T + 1] of one step: sequences that count up by 1 to 4 from anywhere."""
    sizes = plan.sizes
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    start = torch.randint(sizes.vocabulary, (sizes.batch, 1), generator=generator)
    stride = torch.randint(1, 5, (sizes.batch, 1), generator=generator)
    tokens = (start + stride * torch.arange(sizes.steps + 1)) % sizes.vocabulary
    return tokens.to(plan.device)


def train(
    make: Callable[[Sizes, Operators], LanguageModel], operators: Operators, plan: Plan,
    compiled: bool,
) -> Run:
    """Train a model from the same parameters, on the same batches, whatever its operators."""
    torch.manual_seed(plan.seed)
    model = make(plan.sizes, operators).to(plan.device, plan.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss_of(tokens: Tensor) -> Tensor:
        scores = model(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())

    if compiled:
        torch._dynamo.reset()
        loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False, backend=plan.backend)
    batches = [batch_of(plan, step) for step in range(plan.steps)]
    losses: list[Tensor] = []
    untimed = int(plan.steps * UNTIMED)
    started = 0.0
    for step, tokens in enumerate(batches):
        if step == untimed:
            _wait(plan.device)
            started = time.perf_counter()
        loss = loss_of(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    _wait(plan.device)
    step_ms = (time.perf_counter() - started) * 1e3 / (plan.steps - untimed)
    found = tuple(float(loss) for loss in losses)
    return Run(found, step_ms if plan.device.type == "cuda" else None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(
    make: Callable[[Sizes, Operators], LanguageModel], library: Operators, plan: Plan
) -> Comparison:
    """Train a block in eager PyTorch and with the library, each eager and compiled."""
    from kgen_ops import DispatchError

    eager = Operators(eager_operators.rmsnorm, eager_operators.wkv6)
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    for compiled in (False, True):
        for name, operators in ((EAGER, eager), (LIBRARY, library)):
            if name in refused:  # compiled, it would be refused for the same reason
                continue
            title = f"{name}, compiled" if compiled else name
            try:
                runs[title] = train(make, operators, plan, compiled)
            except (DispatchError, NotImplementedError) as why:
                refused[name] = str(why)
    return Comparison(runs, refused)


def table_of(comparison: Comparison) -> str:
    """Losses by step, the largest differences, and the time of a step where it was taken."""
    runs = comparison.runs
    widths = [max(len(name), 10) for name in runs]

    def line(label: str, cells: Sequence[str]) -> str:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([label.ljust(18), *padded])

    lines = [line("step", list(runs))]
    lines += [
        line(str(step), [f"{loss:.6f}" for loss in losses])
        for step, losses in enumerate(zip(*(r.losses for r in runs.values()), strict=True), 1)
    ]
    lines.append(line("largest difference", [f"{d:.1e}" for d in comparison.differences.values()]))
    times = [run.step_ms for run in runs.values()]
    if None not in times:
        lines.append(line("ms per step", [f"{ms:.3f}" for ms in times]))
    for name, why in comparison.refused.items():
        lines += [f"{name} was not run:", *(f"  {text}" for text in why.splitlines())]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both blocks; 1 if the library could not serve one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(default))
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, at least 1")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--block", choices=BLOCKS, action="append", default=[])
    parser.add_argument("--capture", metavar="FILE", help="write down the calls of kgen_ops")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1 is needed")
    try:
        library = library_operators()
    except ImportError as why:
        print(f"{why}\n  next: pip install ./generated", file=sys.stderr)
        return 1
    plan = Plan(Sizes(), options.steps, options.device, DTYPES[options.dtype], options.backend)
    served = True
    with _captured(options.capture, plan):
        for name in options.block or BLOCKS:
            print(f"{name} block, {options.dtype} on {options.device}: {plan.sizes}", flush=True)
            comparison = compare(BLOCKS[name], library, plan)
            print(table_of(comparison), end="\n\n", flush=True)
            served &= not comparison.refused
    return 0 if served else 1


def _captured(file: str | None, plan: Plan) -> AbstractContextManager[object]:
    """Capture the calls of both runs with the library, the eager and the compiled one."""
    import kgen_ops

    return nullcontext() if file is None else kgen_ops.capture(file, steps=2 * plan.steps)


if __name__ == "__main__":
    sys.exit(main())
