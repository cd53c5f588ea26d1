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
"""The extents of a set that are not the problem's own."""

Threads = Callable[[Problem], int]
"""Threads of all CTAs that a kernel takes for a problem."""


def tensor_bytes(pass_: Pass, problem: Problem) -> int:
    """Bytes of all inputs and outputs."""
    return sum(
        math.prod(problem.shape(t.dims)) * problem.dtype(t.dtype).itemsize for t in pass_.tensors
    )


@dataclass(frozen=True, slots=True)
class SetLimits:
    """What the extents of the input sets of one problem have to keep to.

    Attributes:
        operator: Declares dims and the slab dim.
        pass_: One of its passes.
        problem: At full size.
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
        """Whether a set is not too large for a host run.

        A dim compiled in may make even one row of some sets large. Sets of many steps may take
        more, and were chosen by that.
        """
        serial = any(dims.get(name, 0) > SHORT for name in self.operator.serial_dims)
        times = SERIAL_WORK if serial else 4
        return self.bytes(dims) <= 4 * self.sizes.small and not self.is_too_much_work(dims, times)

    def is_modest(self, dims: Dims, threads: Threads | None, times: int) -> bool:
        """Whether a set is neither too large nor too much work, `times` a small set's at most."""
        return (
            self.bytes(dims) <= self.sizes.small * min(times, 4)
            and not self.is_too_much_work(dims, times, self.sizes.far_flops)
            and not self.are_too_many(dims, threads)
        )

    def is_too_much_work(
        self, dims: Dims, times: int = 1, far_flops: int | None = None
    ) -> bool:
        """Whether a set takes more operations than `times` a small set's, or than `far_flops`."""
        most = far_flops if self.sizes.flops is None else times * self.sizes.flops
        if most is None:
            return False
        return self.operator.cost(self.pass_.name, self.problem_with(dims)).flops > most

    def are_too_many(self, dims: Dims, threads: Threads | None) -> bool:
        """Whether a kernel takes more threads for a set than the host may switch."""
        most = self.sizes.threads
        return most is not None and threads is not None and threads(self.problem_with(dims)) > most

    def takes_many(self, dims: Dims, threads: Threads | None) -> bool:
        """Whether a set of little work takes threads by the thousand."""
        return threads is not None and threads(self.problem_with(dims)) > MANY_THREADS

    def smallest_extents(self, constants: Collection[str]) -> Dims:
        """Every run-time dim as small as it may be."""
        return {
            dim.name: max(1, dim.smallest)
            for dim in self.operator.signature.dims
            if dim.name not in constants and not self.is_implied(dim.name)
        }

    def narrow_extents(self, constants: Collection[str]) -> Dims:
        """Every run-time dim as small as it may be, but the last of an output: errors are relative
        to the values along it, and one value may be nearly 0 where its terms are not.
        """
        last = {t.dims[-1] for t in self.pass_.results}
        smallest = self.smallest_extents(constants)
        packing = self.operator.signature.packing
        if packing is not None and packing.sequences in smallest:
            smallest[packing.sequences] = PACKED  # some begin late in a long tensor
        return {
            name: min(max(extent, NARROW), self.problem.dim(name)) if name in last else extent
            for name, extent in smallest.items()
        }

    def smallest(self, dim: Dim) -> int:
        """The least extent of a dim; of a packed tensor's sequences at least one."""
        packing = self.operator.signature.packing
        is_count = packing is not None and dim.name == packing.sequences
        return max(dim.smallest, 1) if is_count else dim.smallest

    def repeats(self, name: str) -> bool:
        """Whether a dim repeats the work of the others, as heads do."""
        return name in self.operator.repeats

    def is_implied(self, dim: str) -> bool:
        """Whether other dims say what a dim is."""
        implied = self.operator.signature.implied(dict(self.problem.dtypes))
        return implied is not None and dim == implied[0]

    def is_one_sum(self, name: str) -> bool:
        """Whether one CTA has all rows and adds them: a running fp32 sum of 256 may miss a bound
        that comes from torch's sum by halves.
        """
        return name == self.operator.slab_dim and self.is_summed(name) and self.is_on_host

    def is_summed(self, dim: str) -> bool:
        """Whether an output is a sum over a dim."""
        return any(dim not in t.dims for t in self.pass_.results)

    @property
    def is_on_host(self) -> bool:
        """Whether the host layer runs the sets, or a GPU those of a host's certificate."""
        return self.sizes.flops is not None or self.sizes.far_flops is not None

    def problem_with(self, dims: Dims) -> Problem:
        """The problem with a set's extents."""
        return with_dims(self.problem, dims, self.operator.signature)
