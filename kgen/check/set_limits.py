"""How large an input set may be, and the smallest extents that one may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kgen.check.sizes import MANY_THREADS, NARROW, PACKED, SERIAL_WORK, SHORT, Sizes
from kgen.model.problem import Problem, with_dims
from kgen.model.signature import Dim, Pass
from kgen.operators.base import Operator

Dims = dict[str, int]
"""Extents by dim: those in which a set differs from the problem."""

Threads = Callable[[Problem], int]
"""(problem) -> number of threads, over all CTAs, that a kernel launches for it."""


def tensor_bytes(pass_: Pass, problem: Problem) -> int:
    """Bytes of all inputs and outputs."""
    return sum(
        math.prod(problem.shape(t.dims)) * problem.dtype(t.dtype).itemsize for t in pass_.tensors
    )


@dataclass(frozen=True, slots=True)
class SetLimits:
    """The limits that the extents of one problem's input sets must keep.

    Attributes:
        operator: Declares dims and the slab dim.
        pass_: One of the operator's passes.
        problem: The problem at full size.
        sizes: How large sets other than the problem itself may be.
    """

    operator: Operator
    pass_: Pass
    problem: Problem
    sizes: Sizes

    def bytes(self, dims: Dims) -> int:
        """Bytes of all inputs and outputs of a set."""
        return tensor_bytes(self.pass_, self.problem_with(dims))

    def is_small(self, dims: Dims) -> bool:
        """Whether a set is small enough for a host run.

        A large compile-time dim may make a set too large even with one row. Sets of many steps may
        be `SERIAL_WORK` times a small set's work, by which limit `Extents` chose them.
        """
        serial = any(dims.get(name, 0) > SHORT for name in self.operator.serial_dims)
        times = SERIAL_WORK if serial else 4
        return self.bytes(dims) <= 4 * self.sizes.small and not self.is_too_much_work(dims, times)

    def is_modest(self, dims: Dims, threads: Threads | None, times: int) -> bool:
        """Whether bytes, operations and threads of a set are within the limits.

        Args:
            dims: The set's extents.
            threads: Threads that the kernel launches; None: not limited.
            times: Most operations, as a multiple of a small set's; also most bytes, but at most 4.
        """
        return (
            self.bytes(dims) <= self.sizes.small * min(times, 4)
            and not self.is_too_much_work(dims, times, self.sizes.far_flops)
            and not self.are_too_many(dims, threads)
        )

    def is_too_much_work(
        self, dims: Dims, times: int = 1, far_flops: int | None = None
    ) -> bool:
        """Whether a set takes more operations than `times` times `Sizes.flops`, or than `far_flops`
        where `Sizes.flops` is None.
        """
        most = far_flops if self.sizes.flops is None else times * self.sizes.flops
        if most is None:
            return False
        return self.operator.cost(self.pass_.name, self.problem_with(dims)).flops > most

    def are_too_many(self, dims: Dims, threads: Threads | None) -> bool:
        """Whether a kernel launches more threads for a set than `Sizes.threads` allows."""
        most = self.sizes.threads
        return most is not None and threads is not None and threads(self.problem_with(dims)) > most

    def takes_many(self, dims: Dims, threads: Threads | None) -> bool:
        """Whether a kernel launches more than `MANY_THREADS` threads for a set."""
        return threads is not None and threads(self.problem_with(dims)) > MANY_THREADS

    def smallest_extents(self, constants: Collection[str]) -> Dims:
        """The smallest extent of every run-time dim."""
        return {
            dim.name: max(1, dim.smallest)
            for dim in self.operator.signature.dims
            if dim.name not in constants and not self.is_implied(dim.name)
        }

    def narrow_extents(self, constants: Collection[str]) -> Dims:
        """The smallest extent of every run-time dim, but `NARROW` in the last dim of an output.

        Errors are relative to the values along the last dim. With a single value there, that value
        may be nearly 0 although the terms of its sum are not.
        """
        last = {t.dims[-1] for t in self.pass_.results}
        smallest = self.smallest_extents(constants)
        packing = self.operator.signature.packing
        if packing is not None and packing.sequences in smallest:
            smallest[packing.sequences] = PACKED  # so that some sequences begin late in the tensor
        return {
            name: min(max(extent, NARROW), self.problem.dim(name)) if name in last else extent
            for name, extent in smallest.items()
        }

    def smallest(self, dim: Dim) -> int:
        """The smallest extent of a dim; at least 1 for the number of packed sequences."""
        packing = self.operator.signature.packing
        is_count = packing is not None and dim.name == packing.sequences
        return max(dim.smallest, 1) if is_count else dim.smallest

    def repeats(self, name: str) -> bool:
        """Whether a dim repeats the work of the others, as heads do."""
        return name in self.operator.repeats

    def is_implied(self, dim: str) -> bool:
        """Whether the extent of a dim follows from the other dims."""
        implied = self.operator.signature.implied(dict(self.problem.dtypes))
        return implied is not None and dim == implied[0]

    def is_one_sum(self, name: str) -> bool:
        """Whether a dim is the slab dim, an output is a sum over it, and sizes are a host run's.

        One CTA may then add all rows. A sequential fp32 sum of 256 rows may exceed a bound that
        comes from torch's pairwise sum.
        """
        return name == self.operator.slab_dim and self.is_summed(name) and self.is_on_host

    def is_summed(self, dim: str) -> bool:
        """Whether an output is a sum over a dim."""
        return any(dim not in t.dims for t in self.pass_.results)

    @property
    def is_on_host(self) -> bool:
        """Whether the sizes are those of a host run; a GPU may run the same sets."""
        return self.sizes.flops is not None or self.sizes.far_flops is not None

    def problem_with(self, dims: Dims) -> Problem:
        """The problem with the extents of a set."""
        return with_dims(self.problem, dims, self.operator.signature)
