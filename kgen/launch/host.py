"""Launch on the host layer: the same modules, plans and calls without a GPU."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kgen.errors import LaunchError, LaunchRefusedError
from kgen.launch.base import Device, Module, check_parameters, codes_of, launch_text, resolve
from kgen.launch.sanitized import SanitizedModule
from kgen.model.artifact import Artifact
from kgen.model.plan import Launch, Plan
from kgen.runtime.host import HostFault, HostFunction, HostModule, HostRefusal

if TYPE_CHECKING:
    from kgen.launch.base import Tensors

# Bytes of memory that nobody has written, by thread order, as unwritten_byte of
# kgen/host/thread.hpp: NaN, or numbers for kernels that take another way where something is NaN.
_UNWRITTEN = (0xFF, 0x3F, 0xFF, 0xBF)


class HostDevice(Device):
    """The CPU.

    Attributes:
        orders: Seeds of the order in which the threads of a block run; successive calls of a plan
            use successive seeds. 0 is by rank; another seed shuffles the threads, repeatably. Read
            when a plan is bound.
        threads: OS threads that share the blocks; 0 uses all cores. Read at every launch.
    """

    def __init__(self, seed: int = 0, threads: int = 0) -> None:
        self.orders: tuple[int, ...] = (seed,)
        self.threads = threads

    @property
    def torch_device(self) -> torch.device:
        """See `Device`."""
        return torch.device("cpu")

    def load(self, artifact: Artifact) -> Module:
        """See `Device`; a sanitized build runs each launch in a process of its own."""
        if artifact.kind == "exe":
            return SanitizedModule(artifact, self.torch_device, self.orders[0])
        if artifact.kind != "so":
            raise LaunchError(f"{artifact.path} is of kind '{artifact.kind}'; the host loads 'so'")
        return LoadedSharedObject(artifact, self)

    def synchronize(self) -> None:
        """Return at once: a host launch is synchronous."""


class LoadedSharedObject(Module):
    """A shared object; its code stays loaded as long as the process."""

    def __init__(self, artifact: Artifact, device: HostDevice) -> None:
        """Load the shared object; see `HostDevice.load`."""
        super().__init__(artifact)
        self._device = device
        try:
            self._module = HostModule(artifact.path)
        except OSError as error:
            raise LaunchError(f"{artifact.path} does not load: {error}") from None

    def bind(
        self, plan: Plan, tensors: Tensors, numbers: Mapping[str, int | float]
    ) -> Callable[[], None]:
        """See `Module`. The result is synchronous."""
        steps = []
        held = list(tensors.values())
        unwritten: list[torch.Tensor] = []
        for place, launch in enumerate(plan.launches):
            if launch.is_empty:
                continue
            early = _early_memory(plan, place, tensors)
            shown = {**tensors, **early}
            unwritten += [decoy.view(torch.uint8) for decoy in early.values()]
            steps.append((launch, self._function(launch.kernel),
                          self._arguments(launch, shown, numbers),
                          [(decoy.data_ptr(), _data(tensors, name), decoy.nbytes)
                           for name, decoy in early.items()]))
        device = self._device
        orders = itertools.cycle(device.orders)

        def run(_held: Sequence[torch.Tensor | None] = held) -> None:
            seed = next(orders)
            for memory in unwritten:
                memory.fill_(_UNWRITTEN[seed % len(_UNWRITTEN)])
            for launch, function, arguments, early in steps:
                try:
                    function.launch(launch.grid, launch.block, launch.smem_bytes, arguments,
                                    seed, device.threads, launch.pdl, early)
                except HostFault as error:
                    where = f"{launch_text(launch)}, thread order {seed}"
                    refused = isinstance(error, HostRefusal)
                    kind = LaunchRefusedError if refused else LaunchError
                    raise kind(f"{error}\n  {where}") from None

        return run

    def occupancy(self, kernel: str, threads: int, smem_bytes: int) -> int:
        """See `Module`: one block at a time on each OS thread."""
        self._function(kernel)
        return 1

    def close(self) -> None:
        """See `Module`; releases the memory of the fibers."""
        self._module.close()

    def _function(self, kernel: str) -> HostFunction:
        try:
            return self._module.function(kernel)
        except HostFault as error:
            raise LaunchError(str(error)) from None

    def _arguments(
        self, launch: Launch, tensors: Tensors, numbers: Mapping[str, int | float]
    ) -> list[Any]:
        arguments: list[Any] = []
        values = resolve(launch, tensors, numbers, self._device.torch_device)
        sizes = self._function(launch.kernel).parameter_bytes()
        check_parameters(launch, codes_of(values), sizes)
        for value in values:
            if value is None or isinstance(value, torch.Tensor):
                arguments.append(ctypes.c_void_p(value.data_ptr() if value is not None else None))
            elif isinstance(value, int):
                arguments.append(ctypes.c_longlong(value))
            else:
                arguments.append(ctypes.c_float(value))
        return arguments


def _early_memory(plan: Plan, place: int, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Memory that a launch with `pdl` finds in place of earlier results until it has waited.

    Counters, which are no results, are left out.

    Args:
        plan: The plan.
        place: The launch's place in the plan.
        tensors: The call's tensors by name.
    Returns:
        By the name of each workspace that an earlier kernel has as well.
    """
    launch = plan.launches[place]
    if not launch.pdl:
        return {}
    earlier = {name for before in plan.launches[:place] for name in before.args}
    found: dict[str, torch.Tensor] = {}
    for workspace in plan.workspaces:
        actual = tensors.get(workspace.name)
        if actual is None or not actual.is_floating_point() or not actual.numel():
            continue
        if workspace.name in launch.args and workspace.name in earlier:
            found[workspace.name] = torch.empty_like(actual)
    return found


def _data(tensors: Tensors, name: str) -> int:
    tensor = tensors[name]
    assert tensor is not None
    return tensor.data_ptr()
