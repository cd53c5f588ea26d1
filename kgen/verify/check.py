"""Run a kernel on input sets and say whether it computed its operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kgen.model.plan import Workspace
from kgen.model.problem import Problem
from kgen.model.record import OutputAccuracy
from kgen.verify.buffers import Guarded, fingerprint, guarded
from kgen.verify.cases import Case
from kgen.verify.compare import explain
from kgen.verify.errors import scaled_errors
from kgen.verify.fixture import Admits, Fixture, InputSet, guard_numbers
from kgen.verify.oracle import torch_dtype
from kgen.verify.verdict import Verdict

Level = Literal["trial", "certify", "host"]
Bind = Callable[[Mapping[str, Tensor]], Callable[[], None]]
Workspaces = Callable[[Problem], Sequence[Workspace]]

LAUNCHES: Mapping[Level, int] = {"trial": 2, "certify": 4, "host": 4}
"""On each input set: the first with poisoned workspaces, the others with what that one left."""


def no_workspaces(problem: Problem) -> Sequence[Workspace]:
    """What a kernel without scratch memory asks for."""
    return ()


def verify(
    fixture: Fixture,
    bind: Bind,
    level: Level = "trial",
    *,
    workspaces: Workspaces = no_workspaces,
    admits: Admits | None = None,
    constants: Collection[str] | None = None,
    seed: int | None = None,
    bitwise: bool = True,
    launches: int | None = None,
) -> Verdict:
    """Try a kernel on one input set after another until one refuses it.

    Every output element of every set must be within |y - y64| <= bound * scale, and NaN or Inf
    exactly where the oracle says; outputs and workspaces start as NaN; nothing outside the
    outputs and workspaces may change; further launches on the same inputs, with outputs poisoned
    again and workspaces as the launch before left them, must give the same bits.

    Args:
        fixture: Of the operator, pass, problem and device.
        bind: Given all inputs, outputs and workspaces by name, returns a callable that launches
            the kernel on torch's current stream. Called once per input set.
        level: `trial`: a fresh small set, one hard case in turn, and the problem itself at full
            size; `certify`: all cases, ragged and strided ones, and a fresh set of full size;
            `host`: all cases, ragged and strided ones, at sizes that a CPU gets through.
        workspaces: The scratch memory that the kernel needs for a problem.
        admits: Whether the variant's guards admit a call (see `guard_numbers` for the names it
            may ask for); sets that it refuses are skipped. None admits everything.
        constants: Dims that are compile-time constants of the kernel and so keep their extents;
            None: all but the operator's slab dim.
        seed: Of the fresh inputs; None to take the fixture's next.
        bitwise: Whether repeated launches must agree bit by bit. If not, each must be within
            the bound.
        launches: On each input set; None for the level's own number.
    Returns:
        The verdict.
    Raises:
        VerifyError: If the operator's own module is at fault.
    """
    if constants is None:
        names = {dim.name for dim in fixture.operator.signature.dims}
        constants = names - {fixture.operator.slab_dim}
    seed = fixture.next_seed() if seed is None else seed
    schedule = fixture.schedule
    choose = {"trial": schedule.trial, "certify": schedule.certify, "host": schedule.host}[level]
    cases = choose(seed, constants)
    tried: list[Case] = []
    skipped: list[str] = []
    worst: dict[str, OutputAccuracy] = {}
    reason = ""
    with torch.no_grad():
        for case in cases:
            made = fixture.input_set(case)
            if admits is not None and not admits(guard_numbers(fixture, made), made.tensors):
                skipped.append(case.label)
                continue
            tried.append(case)
            found = _Check(fixture, made, workspaces(made.problem), bitwise).run(
                bind, LAUNCHES[level] if launches is None else launches
            )
            for accuracy in found.accuracy:
                known = worst.get(accuracy.output)
                if known is None or _share(accuracy) > _share(known):
                    worst[accuracy.output] = accuracy
            if found.reason:
                reason = f"{found.reason}\n  inputs '{case.label}', seed {case.seed}"
                break
    if not tried:
        reason = (
            f"the variant's guards admit none of the {len(cases)} input sets\n"
            f"  skipped: {', '.join(skipped)}"
        )
    return Verdict(
        ok=not reason,
        reason=reason,
        level=level,
        accuracy=tuple(worst.values()),
        cases=tuple(case.label for case in tried),
        seeds=tuple(case.seed for case in tried),
        skipped=tuple(skipped),
    )


@dataclass(frozen=True, slots=True)
class _Finding:
    reason: str
    accuracy: tuple[OutputAccuracy, ...]


class _Check:
    """One kernel on one input set.

    All comparisons are left on the device and read back together: waiting once per set, not
    once per question, is what keeps a small problem's verification in fractions of a ms.
    """

    def __init__(
        self, fixture: Fixture, made: InputSet, workspaces: Sequence[Workspace], bitwise: bool
    ) -> None:
        self._fixture = fixture
        self._made = made
        self._bitwise = bitwise
        self._scratch = {w.name: _workspace(w, made.problem, fixture.device) for w in workspaces}

    def run(self, bind: Bind, runs: int) -> _Finding:
        made, outputs = self._made, self._made.outputs
        tensors = made.tensors | {name: b.tensor for name, b in self._scratch.items()}
        for buffer in outputs.values():
            buffer.poison()
        launch = bind(tensors)
        differs: dict[str, Tensor] = {}
        first: dict[str, Tensor] = {}
        errors: list[dict[str, Tensor]] = []
        for number in range(runs):
            if number:
                for buffer in outputs.values():
                    buffer.poison_data()
            launch()
            if self._bitwise:
                for name, buffer in outputs.items():
                    self._compare_bits(name, fingerprint(buffer), first, differs)
            # Launches that agree bit by bit need comparing with the oracle only once.
            if number == runs - 1 or not self._bitwise:
                errors.append(self._errors())
        return self._verdict(differs, errors, launch)

    @staticmethod
    def _compare_bits(
        name: str, bits: Tensor, first: dict[str, Tensor], differs: dict[str, Tensor]
    ) -> None:
        if name not in first:
            first[name] = bits
            return
        now = (bits != first[name]).any()
        differs[name] = differs[name] | now if name in differs else now

    def _errors(self) -> dict[str, Tensor]:
        """Largest scaled error per output, still on the device."""
        outputs = {name: buffer.tensor for name, buffer in self._made.outputs.items()}
        return scaled_errors(self._fixture, self._made, outputs)

    def _verdict(
        self,
        differs: Mapping[str, Tensor],
        errors: list[dict[str, Tensor]],
        launch: Callable[[], None],
    ) -> _Finding:
        made = self._made
        outside: list[tuple[str, Tensor]] = []
        for name, buffer in (*made.outputs.items(), *self._scratch.items()):
            before, after = buffer.damage()
            outside += [
                (f"wrote before the start of {name}", before),
                (f"wrote past the end of {name}", after),
            ]
        changed = [
            (name, (fingerprint(buffer) != made.prints[name]).any())
            for name, buffer in made.inputs.items()
        ]
        measured = [(name, error) for each in errors for name, error in each.items()]
        asked = (*outside, *changed, *differs.items(), *measured)
        answers = iter(torch.stack([answer.double() for _, answer in asked]).tolist())

        told = [text for text, _ in outside if next(answers)]
        spoiled = [name for name, _ in changed if next(answers)]
        told += [self._damage_of_input(name) for name in spoiled]
        differing = [name for name in differs if next(answers)]
        told += [f"{name} differs between launches on the same inputs" for name in differing]
        largest = dict.fromkeys(made.outputs, 0.0)
        for name, _ in measured:
            error = next(answers)
            largest[name] = max(largest[name], math.inf if math.isnan(error) else error)
        if spoiled:
            # What references are evaluated from may be gone: say nothing about the outputs.
            self._fixture.spoiled(made)
        else:
            wrong = self._wrong(largest)
            if differing and not wrong and self._scratch:
                told += self._with_poisoned_workspaces(launch)
            told += [self._explained(name) for name in wrong]
        return _Finding(
            "\n  ".join(told),
            tuple(
                OutputAccuracy(name, error, b.bound, b.eager_error, b.loss)
                for name, error in largest.items()
                for b in [made.bounds[name]]
            ),
        )

    def _wrong(self, errors: Mapping[str, float]) -> list[str]:
        return [
            name for name, error in errors.items() if not error <= self._made.bounds[name].bound
        ]

    def _with_poisoned_workspaces(self, launch: Callable[[], None]) -> list[str]:
        """Launches differ and the last was right: was the first one wrong?"""
        for buffer in (*self._made.outputs.values(), *self._scratch.values()):
            buffer.poison()
        launch()
        errors = {name: float(error) for name, error in self._errors().items()}
        return [f"with poisoned workspaces {self._explained(name)}" for name in self._wrong(errors)]

    def _damage_of_input(self, name: str) -> str:
        """Tell a write beside an input from a write into it."""
        before, after = self._made.inputs[name].damage()
        if bool(before):
            return f"wrote before the start of input {name}"
        if bool(after):
            return f"wrote past the end of input {name}"
        return f"input {name} was modified"

    def _explained(self, name: str) -> str:
        declared = next(t for t in self._fixture.pass_.outputs if t.name == name)
        made = self._made
        parts = (
            (slab, references[name])
            for slab, references in self._fixture.references(made)
            if name in references
        )
        return explain(name, made.outputs[name].tensor, declared.dims, made.bounds[name], parts)


def _share(accuracy: OutputAccuracy) -> float:
    return accuracy.error / accuracy.bound


def _workspace(w: Workspace, problem: Problem, device: torch.device) -> Guarded:
    return guarded((w.elements,), torch_dtype(problem.dtype(w.dtype).torch), device)
