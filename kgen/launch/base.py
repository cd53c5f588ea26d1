"""Abstract device and loaded module, for GPUs and the host layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kgen.errors import LaunchError, suggest
from kgen.model.artifact import Artifact
from kgen.model.plan import Launch, Plan
from kgen.model.record import Resources

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor | None]


class Module(ABC):
    """A module loaded on a device.

    Attributes:
        artifact: The artifact that was loaded.
        constant: Names of the tensors that launches must not write; `bind` reads the names. A
            sanitized build stops at a write to one of these tensors; other devices ignore them.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.constant: frozenset[str] = frozenset()

    @property
    def resources(self) -> tuple[tuple[str, Resources], ...]:
        """(kernel, the compiler's resource report); empty on the host."""
        return self.artifact.resources

    @abstractmethod
    def bind(
        self, plan: Plan, tensors: Tensors, numbers: Mapping[str, int | float]
    ) -> Callable[[], None]:
        """Resolve a plan's arguments once, and return a function that launches the whole plan.

        Each of a launch's `args` is a whole number, the name of a tensor or workspace, or the name
        of a number. The address of a tensor is passed; its dtype and shape are not checked. An int
        is passed as `long long`, a float as `float`. The result keeps the tensors alive. It
        launches on torch's current stream, so it may be captured in a CUDA graph, and returns
        before the GPU has finished. With `pdl` (programmatic dependent launch) a GPU may begin the
        launch before the previous kernel in the stream has ended; the host runs launches one after
        the other.

        Args:
            plan: The plan. Launches with a grid extent of 0 are left out.
            tensors: Inputs, outputs and workspaces by name, on this device. None stands for a
                tensor that the problem leaves out, and is passed as a null pointer.
            numbers: Dims, `<tensor>_stride_<dim>`, scalars.
        Raises:
            LaunchError: If a kernel or an argument is missing, a tensor is on another device, the
                shared memory does not fit, or the arguments do not match the kernel's parameters.
                The returned function raises LaunchError if a launch is refused.
        """

    @abstractmethod
    def occupancy(self, kernel: str, threads: int, smem_bytes: int) -> int:
        """Return how many blocks fit on one multiprocessor at once (host: 1).

        Args:
            kernel: Kernel name.
            threads: Threads per block.
            smem_bytes: Dynamic shared memory.
        Raises:
            LaunchError: If there is no such kernel, or a block does not fit.
        """

    @abstractmethod
    def close(self) -> None:
        """Unload. Bound launches, and graphs that captured them, must not run again."""


class Device(ABC):
    """A device that runs kernels: a GPU or the host layer."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """torch's device for this device's tensors."""

    @abstractmethod
    def load(self, artifact: Artifact) -> Module:
        """Load a built module.

        Raises:
            LaunchError: If the file is missing, damaged, or for another kind of device.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all launches have finished.

        Raises:
            LaunchError: If a kernel failed; the process's CUDA context is then unusable.
        """


def resolve(
    launch: Launch, tensors: Tensors, numbers: Mapping[str, int | float], device: torch.device,
) -> list[torch.Tensor | int | float | None]:
    """Return the values of a launch's arguments, in order; None for a null pointer.

    Raises:
        LaunchError: If a name has no value or two values, a value is no number, or a tensor is on
            another device.
    """
    values: list[torch.Tensor | int | float | None] = []
    for name in launch.args:
        if isinstance(name, int):
            values.append(name)
        elif name in tensors and name in numbers:
            raise LaunchError(f"{launch.kernel}: argument '{name}' is given as a tensor and as a "
                              "number")
        elif name in tensors:
            tensor = tensors[name]
            if tensor is not None and tensor.device != device:
                raise LaunchError(f"{launch.kernel}: argument '{name}' is on {tensor.device}, but "
                                  f"the kernel runs on {device}")
            values.append(tensor)
        elif name in numbers:
            number = numbers[name]
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise LaunchError(f"{launch.kernel}: argument '{name}' is {number!r}; want an int "
                                  "or a float")
            values.append(number)
        else:
            raise LaunchError(f"{launch.kernel}: argument '{name}' has no value\n"
                              f"  {suggest(name, [*tensors, *numbers])}")
    return values


def codes_of(values: Sequence[torch.Tensor | int | float | None]) -> str:
    """The type of each argument: `p` for a pointer, `q` for a long long, `f` for a float."""
    return "".join(
        "q" if isinstance(v, int) else "f" if isinstance(v, float) else "p" for v in values
    )


def check_parameters(launch: Launch, codes: str, sizes: tuple[int, ...] | None) -> None:
    """Compare the arguments of a launch with the kernel's parameters.

    The driver does not check them: it would also read the arguments that are missing.

    Args:
        launch: The launch; it has one of its `args` for each code.
        codes: Result of `codes_of`.
        sizes: Bytes of each parameter; None if the driver does not report them.
    Raises:
        LaunchError: If the number or the sizes differ.
    """
    given = tuple(_WIDTHS[code] for code in codes)
    if sizes is None or given == sizes:
        return
    listed = ", ".join(
        f"{name}: {width}" for name, width in zip(launch.args, given, strict=True)
    )
    raise LaunchError(
        f"{launch.kernel}: the plan's arguments are not the kernel's parameters\n"
        f"  plan ({len(given)}, bytes each): {listed}\n"
        f"  kernel ({len(sizes)}): {', '.join(map(str, sizes))}\n"
        "  an int is passed as long long, a float as float"
    )


_WIDTHS = {"p": 8, "q": 8, "f": 4}


def launch_text(launch: Launch) -> str:
    """Describe a launch, for messages."""
    pdl = ", with programmatic dependent launch" if launch.pdl else ""
    return (f"{launch.kernel} with grid {launch.grid}, block {launch.block}, {launch.smem_bytes} "
            f"bytes of dynamic shared memory{pdl}")
