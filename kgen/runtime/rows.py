"""The types of the generated tables: measured rows, safe rows, rules and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from .device import KernelFile
    from .notices import SafeCalls

# Version of the interface between tables and runtime. The runtime refuses a table of another
# format. It is increased whenever the runtime would misread the tables of an older library.
FORMAT = 3

PREDICTED = "predicted"  # evidence of a row that was not measured

CONSTANT = 255  # slot of a launch argument that is the same in every call

Run = Callable[..., None]  # (stream, *input pointers, *output pointers, *scalars)


class RecordedLaunch(NamedTuple):
    """One launch of a recorded plan.

    Attributes:
        launcher: Launches the kernel with the arguments.
        arguments: The constant arguments; None in place of other arguments.
        slots: For each argument, the index of the call's value that it takes; 255 for a constant
            argument. The values are the stream, the addresses of tensors, the addresses of
            workspaces, the scalars.
    """

    launcher: Callable[..., None]
    arguments: tuple[object, ...]
    slots: bytes


class RecordedPlan(NamedTuple):
    """All launches of a plan, the allocators of its workspaces, and its number of scalars."""

    launches: tuple[RecordedLaunch, ...]
    scratch: tuple[Callable[[], Tensor], ...]
    scalars: int


class PreparedLaunch(NamedTuple):
    """The launch of calls of one layout.

    Attributes:
        launch: Launches the kernels.
        stream: Returns torch's current stream of a device.
        device: The device's index; -1 for the CPU.
        outputs: One allocator per output; None for an absent one.
        record: Records the plan of `launch` (`recording.py`).
        safe_calls: Counts the calls, if the safe kernel serves them.
    """

    launch: Run
    stream: Callable[[int], int]
    device: int
    outputs: tuple[Any, ...]
    record: Callable[[], RecordedPlan]
    safe_calls: SafeCalls | None = None


class Call:
    """The numbers of a call by name: dims, strides, and alignments of pointers.

    `call.M`, `call.x_stride_M` (elements), `call.x_ptr` (the address modulo 32).
    """

    def __init__(self, **numbers: int) -> None:
        self.__dict__.update(numbers)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


class Row(NamedTuple):
    """A problem and the kernel that won it.

    Attributes:
        dims: Extents of the problem, in the operator's order.
        dtypes: Dtype names, in the operator's order.
        constants: Dims compiled into the kernel; a call must have the same extents.
        kernel: File stem in `kernels/`.
        config: Variant and parameters, as readable text.
        fits: Whether a call may use the kernel (strides, alignment, run-time dims).
        bind: Prepares the launch for a call.
        record: Identity of the tuning record.
        median_us: Device time of the problem, microseconds: measured, or estimated by a model.
        evidence: `measured` on this GPU; it also says if the row was measured without a search.
            `predicted`: a model chose the kernel, which was verified only on the CPU.
        code: Digest of the machine code that was measured (`code_digest`). The selftest compares it
            with the digest of the cubin. Empty if there is no cubin.
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
    code: str = ""

    @property
    def is_predicted(self) -> bool:
        """Whether the kernel never ran on the row's GPU when the table was written."""
        return self.evidence == PREDICTED


class ConfigCall(Call):
    """A call with the values of a config; a named expression is computed at its first use."""

    def __init__(self, numbers: Mapping[str, object],
                 named: Mapping[str, Callable[[Call], Any]]) -> None:
        super().__init__()
        self.__dict__.update(numbers)
        self.__dict__["_named"] = named

    def __getattr__(self, name: str) -> Any:
        named = self.__dict__["_named"]
        if name not in named:
            raise AttributeError(name)
        value = self.__dict__[name] = named[name](self)
        return value


Value = int | float | bool | str  # the value of a parameter


Rule = Callable[[Call], bool]


class Parameter(NamedTuple):
    """A parameter of a family: its choices, and its value if a config's text omits it."""

    name: str
    choices: tuple[Value, ...]
    default: Value | None = None


class Family(NamedTuple):
    """A variant as code, for every problem and config that its rules admit.

    The library chooses a config for the problem of a call, renders the template and compiles it
    (`families.py`, `adaptation.py`). The functions take a call that also has the config's values,
    the device's facts, the dtypes and their itemsizes.

    Attributes:
        name: The variant; rows name it in their config.
        template: File below `_templates/`.
        constants: Dims compiled into the kernel.
        settings: Settings that distinguish operators with a common template: name -> text.
        parameters: The parameters, in declared order.
        first: Values of configs that a search would try first, in the order of `parameters`.
        named: Named expressions that the rules and the launch use.
        is_safe: Whether the variant is the safe one, which wins rows of tiny problems only.
        admits: Rules that depend on no parameter. If one does not hold, no config is correct.
        fits: The other rules of legality: the config is correct for a call if all hold.
        suits: Rules of efficiency: the config is worth a trial for a call if all hold.
        bind: Prepares the launch for a call.
    """

    name: str
    template: str
    constants: tuple[str, ...]
    settings: Mapping[str, str]
    parameters: tuple[Parameter, ...]
    first: tuple[tuple[Value, ...], ...]
    named: Mapping[str, Callable[[Call], Any]]
    is_safe: bool
    admits: tuple[Rule, ...]
    fits: tuple[Rule, ...]
    suits: tuple[Rule, ...]
    bind: Callable[[KernelFile, Call], Run]


class DispatchRule(NamedTuple):
    """A rule that chooses rows for problems that were not tuned; learnt from measured times.

    The loss of a problem is the time of the chosen row over the time of the problem's best known
    kernel, minus 1.

    Attributes:
        dtypes: Dtypes and options of the problems that it covers, in the operator's order.
        constants: (dim, extent) pairs that a problem must have.
        choose: Returns the records of rows for a call's dims, the preferred first.
        problems: Number of problems from which it was learnt.
        mean_loss: Mean loss on these problems.
        worst_loss: Largest loss on these problems.
        extents: (dim, smallest, largest extent) of these problems; the rule covers problems near
            this range (`rules.py`).
    """

    dtypes: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    choose: Callable[[Call], tuple[str, ...]]
    problems: int
    mean_loss: float
    worst_loss: float
    extents: tuple[tuple[str, int, int], ...] = ()


class SafeRow(NamedTuple):
    """The kernel that is correct for every problem of a dtype combination."""

    dtypes: tuple[str, ...]
    kernel: str
    config: str
    bind: Callable[[KernelFile, Call, Mapping[str, int]], Run]


def bound_row(row: Row | SafeRow, file: KernelFile, call: Call, facts: Mapping[str, int]) -> Run:
    """Bind a row's launch to a call. A safe row also takes the facts of the GPU."""
    return row.bind(file, call, facts) if isinstance(row, SafeRow) else row.bind(file, call)


class Gpu(NamedTuple):
    """A GPU that was tuned for.

    Attributes:
        name: Profile name; also the name of its table's module.
        title: Full product name.
        device_names: Names that the driver reports for it.
        arch: `sm_90a`, or `host`.
        facts: The hardware facts with which its plans were made.
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
    """The `fits` function of a kernel without conditions."""
    return True
