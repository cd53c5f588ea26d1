"""What the generated tables are made of: measured rows, safe rows, the GPUs they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from .device import KernelFile

# Of the tables, and of what the runtime does with them; a table of another format is refused.
# Counted up when a row of an older library would be read wrongly, or not at all.
FORMAT = 2

CONSTANT = 255  # the slot of an argument of a launch that is the same each time

Run = Callable[..., None]  # (stream, *input pointers, *output pointers, *scalars)


class Launch(NamedTuple):
    """One launch of a plan.

    Attributes:
        launcher: Called with the arguments.
        arguments: Those that are the same each time; None for others.
        slots: Of each argument, which value of the call it is; 255 for one that is none. Values
            are the stream, the addresses of tensors, then of workspaces, then the scalars.
    """

    launcher: Callable[..., None]
    arguments: tuple[object, ...]
    slots: bytes


class Recorded(NamedTuple):
    """All launches of a plan, what makes its workspaces, and how many scalars it takes."""

    launches: tuple[Launch, ...]
    scratch: tuple[Callable[[], Tensor], ...]
    scalars: int


class Prepared(NamedTuple):
    """What a call with a known layout needs, resolved once.

    Attributes:
        launch: Launches the kernels.
        stream: Gives torch's current stream of a device.
        device: The device's index; -1 for the CPU.
        outputs: Allocate the outputs, one each; None for one that is not there.
        record: Writes down what `launch` does.
    """

    launch: Run
    stream: Callable[[int], int]
    device: int
    outputs: tuple[Any, ...]
    record: Callable[[], Recorded]


class Call:
    """The numbers of a call by name: dims, strides, alignments of pointers.

    `call.M`, `call.x_stride_M` (elements), `call.x_ptr` (the address modulo 32).
    """

    def __init__(self, **numbers: int) -> None:
        self.__dict__.update(numbers)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


class Row(NamedTuple):
    """A measured problem and the kernel that won it.

    Attributes:
        dims: Extents of the problem, in the operator's order.
        dtypes: Dtype names, in the operator's order.
        constants: Dims compiled into the kernel: a call must have the same.
        kernel: File stem in `kernels/`.
        config: Variant and parameters, for people.
        fits: Whether a call may use the kernel (strides, alignment, run-time dims).
        bind: Makes the launch for a call.
        record: Identity of the tuning record.
        median_us: Measured device time of the problem, microseconds.
        evidence: `measured` on this GPU; says so if it was measured there without a search.
    """

    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    constants: tuple[str, ...]
    kernel: str
    config: str
    fits: Callable[[Call], bool]
    bind: Callable[[KernelFile, Call], Run]
    record: str
    median_us: float
    evidence: str = "measured"


class Rule(NamedTuple):
    """Which rows serve problems that were not tuned, learnt from times of all of them.

    Attributes:
        dtypes: Of the problems that it is for, in the operator's order.
        constants: (dim, extent) that a problem must have.
        choose: Records of rows for a call's dims, the preferred first.
        problems: Number of problems that it was learnt from.
        mean_loss: Time over that of the best kernel known for such a problem, less 1, on average.
        worst_loss: The largest of these.
    """

    dtypes: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    choose: Callable[[Call], tuple[str, ...]]
    problems: int
    mean_loss: float
    worst_loss: float


class SafeRow(NamedTuple):
    """The kernel that is right for every problem of a dtype combination."""

    dtypes: tuple[str, ...]
    kernel: str
    config: str
    bind: Callable[[KernelFile, Call, Mapping[str, int]], Run]


def bound_row(row: Row | SafeRow, file: KernelFile, call: Call, facts: Mapping[str, int]) -> Run:
    """Bind a row's launch to a call; a safe row's to the GPU, too."""
    return row.bind(file, call, facts) if isinstance(row, SafeRow) else row.bind(file, call)


class Gpu(NamedTuple):
    """A GPU that was tuned for.

    Attributes:
        name: Also names the module of its table.
        title: For people.
        device_names: Names the driver reports for it.
        arch: `sm_90a`, or `host`.
        facts: Hardware facts the plans were made with.
    """

    name: str
    title: str
    device_names: tuple[str, ...]
    arch: str
    facts: Mapping[str, int]

    @property
    def compute_capability(self) -> int:
        """90 for sm_90a; 0 for the host."""
        return self.facts["compute_capability"]


def always(call: Call) -> bool:
    """Serve as the conditions of a kernel that has none."""
    return True


def distance(dims: Iterable[int], others: Iterable[int]) -> float:
    """How far two problems are apart: the sum of the logarithms of the ratios of their extents."""
    return sum(abs(log(max(a, 1) / max(b, 1))) for a, b in zip(dims, others, strict=True))
