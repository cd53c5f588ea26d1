"""Inputs, oracle and error bounds of one problem, kept over all trials of that problem."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kgen.check.bounds import Bound, combine, widened
from kgen.check.buffers import Guarded, Together, guarded
from kgen.check.case import EQUAL_VALUES, FARS, Case
from kgen.check.drawing import demand_values, drawn_inputs, laid_out
from kgen.check.hard_values import (
    LARGE_SCALAR,
    LARGE_WEIGHTS,
    UNEQUAL,
    ZEROS,
    base_of,
    enlarged_by,
    linear_in,
    opposite_of,
    scalars_times,
)
from kgen.check.input_set import InputSet
from kgen.check.layouts import output_strides, write
from kgen.check.oracle import WHOLE, Oracle, Reference, Slab, slabs
from kgen.check.precision import rounding_of, torch_dtype
from kgen.check.row_values import BY_ROWS, SIGNS_BY_ROWS, TINY_BY_ROWS
from kgen.check.run_values import RUNS
from kgen.check.schedule import Schedule
from kgen.check.shaped_values import SHAPED
from kgen.check.sizes import GPU_SIZES, HOST_SIZES, Sizes
from kgen.check.sound import demand_narrow, demand_sound, global_state
from kgen.errors import InexactDefinitionError, VerifyError
from kgen.model.problem import Problem
from kgen.model.set_results import fresh_seed
from kgen.operators.base import Operator

_WIDENED = (*ZEROS, LARGE_WEIGHTS, BY_ROWS, TINY_BY_ROWS, SIGNS_BY_ROWS, RUNS, *SHAPED)
"""Sets in which rounding errors do not average out, so their bounds are widened."""
_HOST_CACHE_BYTES = 2 * 2**30
_HOST_SLAB_BYTES = 256 * 2**20
# Most draws of a set. Of 1408 sets of wkv7 and wkv7_decode in fp32 three needed two, none more.
_DRAWS = 4
# A set's own values and other ones alternate between launches. Drawing both for each of ten
# launches took a third of a safe kernel's certificate (wkv6 backward, H200).
_DRAWN_CASES = 2
_DRAWN_BYTES = 64 * 2**20
# The time of a definition that iterates over steps is its kernel launches, which every slab
# repeats. With 8 slabs the first trial of wkv6's backward pass, T = 4096, came after 26 s on an
# H200, that of a forward pass after 8 s. That the number of slabs is the cause is an assumption.
_CUDA_SLAB_BYTES = 32 * 2**30


class Fixture:
    """All that is needed to verify any kernel of one operator, pass and problem on one device.

    Input sets are made at the first request. Sets with a fixed seed stay in an LRU cache of
    `cache_bytes`, together with the oracle's outputs where these fit.

    Attributes:
        operator: The operator.
        pass_: The pass, with the tensors that the problem has.
        problem: The problem at full size.
        device: Where kernels run.
        scalars: Values of the pass's scalars; kernels must be bound with the same values.
        schedule: Chooses the cases.
        cache_bytes: Device memory for cached sets.
    """

    def __init__(
        self,
        operator: Operator,
        pass_name: str,
        problem: Problem,
        device: torch.device,
        *,
        scalars: Mapping[str, float] | None = None,
        seed: int = 0,
        cache_bytes: int | None = None,
        slab_bytes: int | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        """Prepare; evaluates nothing yet.

        Args:
            operator: The operator.
            pass_name: `forward` or `backward`.
            problem: The problem.
            device: Where kernels run.
            scalars: Values of the pass's scalars; None for the defaults.
            seed: Seed of every input set that is not a trial's own.
            cache_bytes: Device memory for cached sets; None: half of the memory that is free now.
            slab_bytes: Memory for the oracle's temporaries; None: a default by device.
            sizes: Limits on the sets other than the problem itself; None: a default by device.
        Raises:
            ProblemError: If the operator has no such pass.
        """
        signature, choices = operator.signature, dict(problem.dtypes)
        packing = signature.packing
        if packing is not None and signature.implied(choices) == (packing.batch, "1"):
            # Packed sequences have one batch row and different lengths: there is no slab dim.
            operator = replace(operator, slab_dim=None)
        self.operator = operator
        self.pass_ = signature.as_batch(
            problem.present(signature.pass_named(pass_name)), choices
        )
        self.problem = problem
        self.device = device
        self.scalars = dict(operator.scalars(pass_name) if scalars is None else scalars)
        self.schedule = Schedule(
            operator,
            self.pass_,
            problem,
            seed,
            sizes or (GPU_SIZES if device.type == "cuda" else HOST_SIZES),
        )
        self.cache_bytes, self.slab_bytes = _limits(device, cache_bytes, slab_bytes)
        self._rounding = rounding_of(operator, problem)
        self._asked = operator.arguments(pass_name, problem)
        self._pool: dict[str, Bound] | None = None
        self._bounds_of_kind: dict[tuple[str, Problem], dict[str, Bound]] = {}
        self._kept: OrderedDict[Case, InputSet] = OrderedDict()
        # The oracle of the last set that is not cached: both its errors and their means need it.
        self._recent: tuple[InputSet, References] | None = None
        # The oracle of the last cached set: sets that differ only in layout share an oracle.
        self._last: tuple[Case, Evaluated] | None = None
        self._drawn: OrderedDict[tuple[Case, Problem], dict[str, Tensor]] = OrderedDict()
        self._linear: frozenset[str] | None = None
        self._nearest: Mapping[str, float] | None = None
        self._trials = 0

    def next_seed(self) -> int:
        """A new seed for a trial without one: from the fixture's seed and a count of trials."""
        self._trials += 1
        return fresh_seed(self.schedule.seed, self._trials)

    def input_set(self, case: Case) -> InputSet:
        """Return the set of a case, from the cache or newly made.

        Raises:
            VerifyError: If the case does not distinguish right from wrong kernels, or if the
                operator's module contradicts its signature.
        """
        if case in self._kept:
            self._kept.move_to_end(case)
            return self._kept[case]
        made = self._made_or_drawn_again(case)
        if not case.fresh and case.layout not in FARS:
            self._kept[case] = made
        return made

    def _made_or_drawn_again(self, case: Case) -> InputSet:
        """Make a set. If the definition is too inexact for hard values, draw them with other seeds.

        Hard values of two inputs may cancel exactly: a state of whole numbers whose sum is 0, read
        with equal factors. The author of the operator can do nothing about that.
        """
        is_hard = base_of(self.operator, case) != case.name
        for count in range(1, _DRAWS):
            try:
                return self._make(case)
            except InexactDefinitionError:
                if not is_hard:
                    raise
                case = replace(case, seed=fresh_seed(case.seed, count))
        return self._make(case)

    def put_values(self, made: InputSet, case: Case) -> None:
        """Overwrite the contents of a set's input buffers with the values of a case."""
        for name, value in self.values(case, made.problem).items():
            write(made.inputs[name].tensor, value)
            if name in made.initial:
                made.initial[name].copy_(value)

    def values(self, case: Case, problem: Problem) -> dict[str, Tensor]:
        """Draw the inputs of a case, by name; the last few small ones are kept.

        Raises:
            VerifyError: If `make_inputs` contradicts the signature.
        """
        if (case, problem) in self._drawn:
            self._drawn.move_to_end((case, problem))
            return dict(self._drawn[case, problem])
        drawn = drawn_inputs(
            self.operator, self.pass_, case, problem, lambda: self._linear_names, self.device
        )
        if sum(value.nbytes for value in drawn.values()) <= _DRAWN_BYTES:
            self._drawn[case, problem] = dict(drawn)
            while len(self._drawn) > _DRAWN_CASES:
                self._drawn.popitem(last=False)
        return drawn

    def spoiled(self, made: InputSet) -> None:
        """Drop a set whose inputs a kernel has overwritten."""
        for case in [case for case, kept in self._kept.items() if kept is made]:
            del self._kept[case]
        self._recent = self._last = None

    def release(self, keep: Case | None = None) -> None:
        """Free the memory of all cached sets except the one of `keep`."""
        self._recent = self._last = None
        self._drawn.clear()
        for case in [case for case in self._kept if case != keep]:
            del self._kept[case]

    @property
    def kept_bytes(self) -> int:
        """Device memory of the cached sets."""
        return sum(s.bytes for s in self._kept.values())

    def references(self, made: InputSet) -> Iterator[tuple[Slab, Mapping[str, Reference]]]:
        """Yield the oracle's outputs slab by slab, cached or evaluated now; outputs that are sums
        over the slab dim come once, at the end.
        """
        if made.cached is not None:
            yield from made.cached
        elif self._recent is not None and self._recent[0] is made:
            yield from self._recent[1]
        elif self.kept_bytes + made.bytes + self._reference_bytes(made.problem) > self.cache_bytes:
            yield from self._evaluated(made)
        else:
            self._recent = (made, tuple(self._evaluated(made)))
            yield from self._recent[1]

    def _evaluated(self, made: InputSet) -> Iterator[tuple[Slab, Mapping[str, Reference]]]:
        inputs = made.values
        oracle = self._oracle(made.case)
        sums = oracle.sums(made.problem)
        for slab in slabs(self.operator, self.pass_, made.problem, self.slab_bytes):
            yield slab, oracle.references(made.problem, inputs, slab, sums)
        yield WHOLE, sums.references()

    def _reference_bytes(self, problem: Problem) -> int:
        """Device memory that the oracle's values of a set take."""
        return sum(
            math.prod(problem.shape(t.dims)) * (12 if problem.dtype(t.dtype).itemsize == 4 else 8)
            for t in self.pass_.results
        )

    def _make(self, case: Case) -> InputSet:
        before = global_state(self.device) if self._nearest is None else {}
        problem = case.problem(self.problem, self.operator.signature)
        self._recent = None
        outputs_bytes = sum(
            math.prod(problem.shape(t.dims)) * problem.dtype(t.dtype).itemsize
            for t in self.pass_.results
        )
        reference_bytes = self._reference_bytes(problem)
        input_bytes = sum(
            math.prod(problem.shape(t.dims)) * problem.dtype(t.dtype).itemsize
            for t in self.pass_.inputs
        )
        base = input_bytes + outputs_bytes
        keep = base + reference_bytes <= self.cache_bytes
        self._make_room(base + (reference_bytes if keep else 0))
        drawn = self.values(case, problem)
        demand_values(self.operator, self.pass_, case, drawn)
        if self._nearest is None:
            oracle = Oracle(self.operator, self.pass_, self._asked | self.scalars)
            self._nearest = demand_sound(
                self.operator, self.pass_, self.problem, oracle, self.device, before
            )
        inputs = laid_out(
            self.operator, self.pass_, case, problem, drawn, lambda: self._linear_names,
            self.device,
        )
        del drawn
        together = Together(inputs)
        prints = together.prints()
        bounds, cached = self._evaluate(case, problem, inputs, keep)
        changed = together.prints() != prints
        if bool(changed.any()):
            raise VerifyError(
                f"{self.operator.name}: the definition writes into its input "
                f"'{together.where(changed)[0]}'\n"
                "  next: compute out of place there; kernels are checked for the same"
            )
        outputs = {
            t.name: guarded(
                problem.shape(t.dims),
                torch_dtype(problem.dtype(t.dtype).torch),
                self.device,
                output_strides(t, inputs),
            )
            for t in self.pass_.outputs
        }
        held = base + (reference_bytes if keep else 0)
        values = {name: buffer.tensor for name, buffer in inputs.items()}
        initial = {t.name: values[t.name].clone() for t in self.pass_.in_outs}
        untouched: Mapping[str, Tensor] = {}
        if initial and self.operator.untouched is not None:
            untouched = self.operator.untouched(self.pass_.name, values)
        return InputSet(
            case, problem, inputs, outputs, prints, bounds, cached, held, initial, untouched
        )

    @property
    def _linear_names(self) -> frozenset[str]:
        """The inputs and scalars in which all outputs are linear, computed at the first use."""
        if self._linear is None:
            self._linear = linear_in(
                self.operator, self.pass_, self.problem, self._asked | self.scalars, self.device
            )
        return self._linear

    def _evaluate(
        self, case: Case, problem: Problem, inputs: Mapping[str, Guarded], keep: bool
    ) -> Evaluated:
        # Fresh sets of one kind share the bounds of the first: running the definition in the
        # problem's dtypes for each would take most of a trial.
        kind = (case.name, problem)
        if case.fresh and kind in self._bounds_of_kind:
            return self._bounds_of_kind[kind], None
        values_of = case.values
        if keep and self._last is not None and self._last[0] == values_of:
            return self._last[1]
        pool = self._pool_bounds()
        # torch's reductions depend on the layout; the definition's loss must not.
        tensors = {name: b.tensor.contiguous() for name, b in inputs.items()}
        losses, kept = self._losses(case, problem, tensors, keep)
        bounds = combine(
            losses, pool, self.pass_, problem, self._name(case, problem), self._rounding
        )
        if case.name in _WIDENED or case.layout in EQUAL_VALUES:
            bounds = widened(bounds)
        if case.fresh:
            self._bounds_of_kind[kind] = bounds
        if keep:
            self._last = (values_of, (bounds, tuple(kept)))
        return bounds, tuple(kept) if keep else None

    def _losses(
        self, case: Case, problem: Problem, tensors: Mapping[str, Tensor], keep: bool
    ) -> tuple[dict[str, tuple[float, float]], list[tuple[Slab, Mapping[str, Reference]]]]:
        losses = {t.name: (0.0, 0.0) for t in self.pass_.results}
        kept: list[tuple[Slab, Mapping[str, Reference]]] = []
        if all(math.prod(problem.shape(t.dims)) == 0 for t in self.pass_.results):
            return losses, kept  # a definition need not support reductions over empty dims
        oracle = self._oracle(case)
        sums = oracle.sums(problem)
        # Sums need every slab. Otherwise the definition's loss is measured on the first slab only:
        # the maximum over fewer elements can only be smaller, so the bound is not looser; and a
        # definition may be slow in the problem's dtypes, where float64's shortcuts do not apply.
        one_is_enough = not sums.names
        for index, slab in enumerate(slabs(self.operator, self.pass_, problem, self.slab_bytes)):
            if index > 0 and one_is_enough:
                if not keep:
                    break
                kept.append((slab, oracle.references(problem, tensors, slab, sums)))
                continue
            done = oracle.evaluate(problem, tensors, slab, sums)
            for name in done.references:
                eager, ranged = losses[name]
                losses[name] = (max(eager, done.eager[name]), max(ranged, done.ranged[name]))
            if keep:
                kept.append((slab, done.references))
        losses |= sums.losses()
        if keep:
            kept.append((WHOLE, sums.references()))
        return losses, kept

    def _pool_bounds(self) -> dict[str, Bound]:
        """Bounds from ordinary inputs; they are lower limits for the bounds of all other inputs.

        On a set of few elements the definition may by chance lose almost nothing. Without a lower
        limit, a kernel would then have to be more accurate than the definition usually is.
        """
        if self._pool is None:
            pool: dict[str, Bound] = {}
            for case in self.schedule.pool():
                problem = case.problem(self.problem, self.operator.signature)
                losses, _ = self._losses(case, problem, self.values(case, problem), keep=False)
                what = self._name(case, problem)
                pool = combine(losses, pool, self.pass_, problem, what, self._rounding)
            self._pool = pool
            demand_narrow(self.operator, self._nearest or {}, pool)
        return self._pool

    def scalars_of(self, case: Case) -> dict[str, float]:
        """The values of the pass's scalars for a case, by name."""
        if case.opposite:
            return opposite_of(self.pass_, self.scalars, self._linear_names)
        if case.name in UNEQUAL and case.name not in self.operator.cases:
            return scalars_times(LARGE_SCALAR, self.pass_, self.scalars, self._linear_names)
        return self.scalars | dict(case.scalars)

    def _oracle(self, case: Case) -> Oracle:
        return Oracle(self.operator, self.pass_, self._asked | self.scalars_of(case),
                      enlarged_by(case, self.pass_, self.problem))

    def _name(self, case: Case, problem: Problem) -> str:
        return f"{self.operator.name} {self.pass_.name} {problem}, inputs '{case.label}'"

    def _make_room(self, wanted: int) -> None:
        while self._kept and self.kept_bytes + wanted > self.cache_bytes:
            self._kept.popitem(last=False)


Evaluated = tuple[dict[str, Bound], "References | None"]
"""The bounds of a set, and the oracle's values if they are cached."""

References = tuple[tuple[Slab, Mapping[str, Reference]], ...]

Admits = Callable[[Mapping[str, int | str], Mapping[str, Tensor]], bool]
"""(numbers, tensors) -> whether a variant's guards admit a call."""


def guard_numbers(fixture: Fixture, made: InputSet) -> dict[str, int | str]:
    """The numbers that a guard may use: the problem's names, and `<tensor>_stride_<dim>` in
    elements for each free stride; 0 for a tensor that the problem leaves out.
    """
    numbers = made.problem.names
    tensors = made.tensors
    for t in fixture.operator.signature.pass_named(fixture.pass_.name).tensors:
        for dim in t.free_strides:
            numbers[f"{t.name}_stride_{dim}"] = (
                tensors[t.name].stride(t.dims.index(dim)) if t.name in tensors else 0
            )
    return numbers


def _limits(
    device: torch.device, cache_bytes: int | None, slab_bytes: int | None
) -> tuple[int, int]:
    cache, slab = _HOST_CACHE_BYTES, _HOST_SLAB_BYTES
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cache, slab = free // 2, min(_CUDA_SLAB_BYTES, free // 4)
    return (
        cache if cache_bytes is None else cache_bytes,
        slab if slab_bytes is None else slab_bytes,
    )
