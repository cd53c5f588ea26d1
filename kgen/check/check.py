"""Runs a kernel on input sets and decides whether it computes its operator."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kgen.check.buffers import Fill, Guarded, NoRoomError, Together, guarded
from kgen.check.case import NORMAL, one_by_one, other_case
from kgen.check.errors import (
    explained,
    largest_mean,
    mean_errors,
    scaled_errors,
    touched_elements,
    touched_text,
)
from kgen.check.fixture import Admits, Fixture, guard_numbers
from kgen.check.input_set import InputSet
from kgen.check.moved import moved
from kgen.check.oracle import read
from kgen.check.parts import places_of, set_costs
from kgen.check.precision import torch_dtype
from kgen.check.scratch import ScratchState, either
from kgen.check.set_limits import Threads
from kgen.check.steps import Step, steps_of
from kgen.check.verdict import Verdict, verdict_from
from kgen.model.plan import Workspace
from kgen.model.problem import Problem
from kgen.model.record import OutputAccuracy
from kgen.model.set_results import Part, SetResult, SetResults

Level = Literal["trial", "certify", "host"]
Bind = Callable[[Mapping[str, Tensor], Mapping[str, float]], Callable[[], None]]
Workspaces = Callable[[Problem], Sequence[Workspace]]

LAUNCHES: Mapping[Level, int] = {"trial": 3, "certify": 5, "host": 4}
"""Launches on the values of each input set; between them are launches in which the same buffers
hold other values (`steps_of`)."""


def no_workspaces(problem: Problem) -> Sequence[Workspace]:
    """The workspaces of a kernel without scratch memory: none."""
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
    steady: Sequence[tuple[str, int]] = (),
    threads: Threads | None = None,
    far: bool = False,
    part: Part | None = None,
    begins: Callable[[int], None] = lambda place: None,
) -> Verdict:
    """Verify a kernel on one input set after another, up to the first set on which it fails.

    The requirements on every set are:

    - Each output element satisfies |y - y64| <= bound * scale, and is NaN or Inf exactly where the
      oracle is.
    - No memory outside the outputs and workspaces changes.
    - All launches on the same inputs give the same bits. The outputs and workspaces may hold
      anything before a launch, and launches between them may use other values in the same input
      buffers (`steps_of`).
    - In-out tensors, which are restored before every launch, keep every bit that the operator
      declares untouched.

    Args:
        fixture: The fixture of the operator, pass, problem and device.
        bind: Given all inputs, outputs and workspaces by name, and the scalars by name, returns a
            callable that launches the kernel on torch's current stream. It is called for each input
            set, and once more to repeat a launch with the tensors at other addresses.
        level: `trial`: a fresh small set, one of the hard cases (the seed selects which), and the
            problem itself at full size; `certify`: all cases, ragged and strided ones, and a fresh
            set of full size; `host`: all cases, ragged and strided ones, at sizes that a CPU can
            run.
        workspaces: The scratch memory that the kernel needs for a problem.
        admits: Whether the variant's guards admit a call (`guard_numbers` has the names that a
            guard may use); sets that it refuses are skipped. At the levels `certify` and `host`, a
            skipped set whose inputs all have awkward strides or addresses is replaced by sets in
            which a single input has them. None admits everything.
        constants: Dims that are compile-time constants of the kernel and so keep their extents;
            None: all but the operator's slab dim.
        seed: Seed of the fresh inputs; None: the fixture's next seed.
        bitwise: Whether repeated launches must agree bit by bit. If not, each launch must be within
            the bound.
        launches: Launches on the values of each input set; None: the level's default.
        steady: (dim, extent) pairs that a host run must reach, see `kgen.check.steady`.
        threads: Threads, over all CTAs, that the kernel launches for a problem; a host run shortens
            sets with too many.
        far: Whether a host run may have rows that are gigabytes apart; they take address space, not
            memory.
        part: Which sets to run; None: all. All parts must be given the same seed. A part's verdict
            is ok if the kernel fails on none of the part's sets, even if all of them were skipped.
        begins: Called with the index of each set before the set is made.
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
    left_out: list[str] = []
    if level == "host":
        cases, left_out = schedule.host(seed, constants, steady, threads, far)
    elif level == "certify":
        cases = schedule.certify(seed, constants)
    else:
        cases = schedule.trial(seed, constants)
    places: Collection[int] = range(len(cases))
    if part is not None:
        costs = set_costs(
            fixture.operator, fixture.pass_.name, fixture.problem, cases, threads)
        places = places_of(part, costs)
    results: list[SetResult] = []
    queue = deque((place, case) for place, case in enumerate(cases) if place in places)
    with torch.no_grad():
        while queue:
            place, case = queue.popleft()
            begins(place)
            left_aside = SetResult(place, case.label, case.seed, skipped=True)
            try:
                made = fixture.input_set(case)
            except NoRoomError:
                results.append(left_aside)
                continue
            if admits is not None and not admits(guard_numbers(fixture, made), made.tensors):
                results.append(left_aside)
                # A kernel that takes only whole vectors refuses the smallest steady set.
                wider = schedule.steady(steady, constants, whole=True) if steady else case
                if case != wider and case == schedule.steady(steady, constants):
                    queue.appendleft((place, wider))
                elif level != "trial" and not case.only:
                    queue.extendleft((place, one) for one in one_by_one(case, fixture.pass_))
                continue
            scratch = workspaces(made.problem)
            count = LAUNCHES[level] if launches is None else launches
            # The mean error is checked on ordinary inputs only: others may all round to one side.
            mean = level != "trial" and case.name == NORMAL
            found = _Check(fixture, made, scratch, bitwise, mean).run(bind, steps_of(count))
            seed = made.case.seed  # of the values, which may have been drawn again
            fault = found.reason and f"{found.reason}\n  inputs '{case.label}', seed {seed}"
            results.append(SetResult(place, case.label, seed, found.accuracy, fault))
            if fault:
                break
    of_sets = SetResults(len(cases), tuple(left_out), tuple(results))
    return verdict_from(of_sets, level, of_sets.fault if part is not None else of_sets.reason)


@dataclass(frozen=True, slots=True)
class _Finding:
    reason: str
    accuracy: tuple[OutputAccuracy, ...]


class _Check:
    """Verifies one kernel on one input set.

    The results of all comparisons stay on the device and are read back together. One
    synchronisation per set instead of one per comparison keeps the verification of a small problem
    in fractions of a ms.
    """

    def __init__(
        self,
        fixture: Fixture,
        made: InputSet,
        workspaces: Sequence[Workspace],
        bitwise: bool,
        mean: bool,
    ) -> None:
        self._fixture = fixture
        self._made = made
        self._bitwise = bitwise
        self._mean = mean
        self._results = Together(made.results)
        self._changed: Tensor | None = None  # bits of the inputs, as in `InputSet.prints`
        self._differs: Tensor | None = None  # bits of the results, from launch to launch
        self._differs_elsewhere: Tensor | None = None
        self._scratch_state = ScratchState({})
        self._scratch = {w.name: _workspace(w, made.problem, fixture.device) for w in workspaces}

    def run(self, bind: Bind, steps: Sequence[Step]) -> _Finding:
        made, outputs = self._made, self._made.outputs
        workspaces = {name: b.tensor for name, b in self._scratch.items()}
        tensors = made.tensors | workspaces
        for buffer in outputs.values():
            buffer.reset()
        launch = bind(tensors, self._fixture.scalars_of(made.case))
        first: Tensor | None = None
        scratch = self._scratch_state = ScratchState(self._scratch if self._bitwise else {})
        errors: list[dict[str, Tensor]] = []
        holds_own = True
        made.restore()
        elsewhere = moved(made) if self._bitwise and len(steps) > 1 else None
        last_other = max((i for i, step in enumerate(steps) if not step.own), default=-1)
        for place, step in enumerate(steps):
            if step.own != holds_own:
                self._put_values(own=step.own)
                holds_own = step.own
            made.restore()
            for buffer in outputs.values():
                buffer.fill(step.outputs)
            for buffer in self._scratch.values():
                buffer.fill(step.workspaces)
            scratch.before_launch(step)
            launch()
            scratch.after_launch(step)
            if place == last_other and elsewhere is not None:
                # Launch at other addresses, while the set's own input buffers hold other values and
                # the workspaces hold what the last launch made of these.
                elsewhere.clear()
                scratch.keep()
                bind(elsewhere.tensors | workspaces, self._fixture.scalars_of(made.case))()
                assert first is not None  # a launch on the set's own values came before
                self._differs_elsewhere = elsewhere.prints(made.results) != first
                scratch.put_back()  # restore the workspaces for the next launch
                elsewhere = None
            if not step.own:
                continue
            if self._bitwise:
                bits = self._results.prints()
                if first is None:
                    first = bits
                else:
                    self._differs = either(self._differs, bits != first)
            # If all launches must agree bit by bit, comparing the last with the oracle suffices.
            if step is steps[-1] or not self._bitwise:
                errors.append(self._errors())
        return self._verdict(errors, launch)

    def _put_values(self, *, own: bool) -> None:
        """Fill the inputs with the set's own values, or with ordinary ones of another seed.

        Before other values overwrite the set's own, inputs are checked for changes, as the
        overwriting hides a kernel's write into an input.
        """
        made = self._made
        if own:
            self._fixture.put_values(made, made.case)
            return
        self._look_for_changes()
        self._fixture.put_values(made, other_case(made.case))

    def _look_for_changes(self) -> None:
        """Note which bits of the inputs have changed, beside those of earlier checks."""
        now = self._made.prints_now() != self._made.prints
        self._changed = either(self._changed, now)

    def _errors(self) -> dict[str, Tensor]:
        """Largest scaled error per output, still on the device."""
        outputs = {name: buffer.tensor for name, buffer in self._made.results.items()}
        return scaled_errors(self._fixture, self._made, outputs)

    def _verdict(
        self,
        errors: list[dict[str, Tensor]],
        launch: Callable[[], None],
    ) -> _Finding:
        made, device = self._made, self._fixture.device
        self._look_for_changes()
        written = Together({**made.outputs, **self._scratch})
        touched = touched_elements(made, {n: b.tensor for n, b in made.results.items()})
        measured = [(name, error) for each in errors for name, error in each.items()]
        means = self._means() if self._mean else {}
        # One read for all, because each read waits for the device. Which buffers differ is only
        # asked where some do.
        answers = iter(read([
            written.is_damaged(device),
            _any(self._changed, device),
            *touched.values(),
            _any(self._differs, device),
            _any(self._differs_elsewhere, device),
            self._scratch_state.has_state(device),
            *(error for _, error in measured),
            *means.values(),
        ]))

        told = written.damages() if next(answers) else []
        spoiled = made.together.where(self._changed) if next(answers) else []
        told += [self._damage_of_input(name) for name in spoiled]
        told += [touched_text(name) for name in touched if next(answers)]
        differing = self._results.where(self._differs) if next(answers) else []
        told += [f"{name} differs between launches on the same inputs" for name in differing]
        elsewhere = self._results.where(self._differs_elsewhere) if next(answers) else []
        told += [
            f"{name} differs between launches on the same inputs if these lie in other memory "
            "than those of the launch before"
            for name in elsewhere
            if name not in differing
        ]
        counters = self._scratch_state.keeping() if next(answers) else []
        told += [
            f"workspace {name} is not the same after another launch on the same inputs: "
            "it keeps state from launch to launch"
            for name in counters
        ]
        largest = dict.fromkeys(made.results, 0.0)
        for name, _ in measured:
            error = next(answers)
            largest[name] = max(largest[name], math.inf if math.isnan(error) else error)
        biased = {name: next(answers) for name in means}
        if spoiled:
            # The inputs, from which the oracle is evaluated, are damaged: do not judge the outputs.
            self._fixture.spoiled(made)
        else:
            wrong = self._wrong(largest)
            if differing and not wrong:
                told += self._with_nonfinite_workspaces(launch)
            told += [self._explained(name) for name in wrong]
            if not wrong:
                told += self._biases(biased)
        return _Finding(
            "\n  ".join(told),
            tuple(
                OutputAccuracy(name, error, b.bound, b.eager_error, b.loss)
                for name, error in largest.items()
                for b in [made.bounds[name]]
            ),
        )

    def _means(self) -> dict[str, Tensor]:
        outputs = {name: buffer.tensor for name, buffer in self._made.results.items()}
        return mean_errors(self._fixture, self._made, outputs)

    def _biases(self, means: Mapping[str, float]) -> list[str]:
        """Describe the outputs whose mean error is too large although each element is in bounds."""
        told = []
        for name, mean in means.items():
            bound = self._made.bounds[name].bound
            allowed = largest_mean(bound, self._made.results[name].tensor)
            if not mean <= allowed:
                told.append(
                    f"{name} is off on average: by {mean:.3g} of its scale, {allowed:.3g} is "
                    f"allowed (of an element {bound:.3g})"
                )
        return told

    def _wrong(self, errors: Mapping[str, float]) -> list[str]:
        return [
            name for name, error in errors.items() if not error <= self._made.bounds[name].bound
        ]

    def _with_nonfinite_workspaces(self, launch: Callable[[], None]) -> list[str]:
        """If launches differ and the last was right, explain errors of a launch with NaN in the
        workspaces.
        """
        if not self._scratch:
            return []
        self._made.restore()
        for buffer in (*self._made.outputs.values(), *self._scratch.values()):
            buffer.fill(Fill.NONFINITE)
        launch()
        errors = {name: float(error) for name, error in self._errors().items()}
        return [f"with NaN in workspaces {self._explained(name)}" for name in self._wrong(errors)]

    def _damage_of_input(self, name: str) -> str:
        """Say whether a kernel wrote into an input, or outside of it."""
        before, after = self._made.inputs[name].damage()
        if bool(before):
            return f"wrote before the start of input {name}"
        if bool(after):
            return f"wrote past the end of input {name}"
        if name in self._made.initial:
            return f"wrote between the rows of {name}"
        return f"input {name} was modified"

    def _explained(self, name: str) -> str:
        return explained(self._fixture, self._made, self._made.results[name].tensor, name)


def _any(differs: Tensor | None, device: torch.device) -> Tensor:
    return torch.zeros((), device=device) if differs is None else differs.any()


def _workspace(w: Workspace, problem: Problem, device: torch.device) -> Guarded:
    return guarded((w.elements,), torch_dtype(problem.dtype(w.dtype).torch), device)
