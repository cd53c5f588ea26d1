"""Launch on the host layer: the same modules, plans and calls without a GPU."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kgen.errors import LaunchError, LaunchRefusedError
from kgen.launch.base import Device, Module, check_parameters, codes_of, launch_text, resolve
from kgen.launch.early import EarlyWrites, early_memory
from kgen.launch.sanitized import SanitizedModule
from kgen.model.artifact import Artifact
from kgen.model.plan import Launch, Plan
from kgen.runtime.host import HostFault, HostFunction, HostModule, HostRefusal

if TYPE_CHECKING:
    from kgen.launch.base import Tensors

# The byte that fills unwritten memory, by thread order; equal to unwritten_byte in
# kgen/host/thread.hpp. 0xFF bytes are NaN; the other bytes are numbers, for kernels that branch on
# NaN.
_UNWRITTEN = (0xFF, 0x3F, 0xFF, 0xBF)


class HostDevice(Device):
    """The CPU.

    Attributes:
        orders: Seeds of the order in which the threads of a block run; successive calls of a plan
            use successive seeds. Seed 0 runs them by rank; any other seed shuffles them, with the
            same result each time. The seeds are read when a plan is bound.
        threads: Number of OS threads that share the blocks; 0 uses all cores. It is read at every
            launch.
        comparisons: File for the comparisons of launches of sanitized builds; None: they are not
            kept. It is read when a build is loaded.
    """

    def __init__(self, seed: int = 0, threads: int = 0) -> None:
        self.orders: tuple[int, ...] = (seed,)
        self.threads = threads
        self.comparisons: Path | None = None

    @property
    def torch_device(self) -> torch.device:
        """See `Device`."""
        return torch.device("cpu")

    def load(self, artifact: Artifact) -> Module:
        """See `Device`; a sanitized build runs each launch in a process of its own."""
        if artifact.kind == "exe":
            return SanitizedModule(
                artifact, self.torch_device, self.orders[0], self.comparisons)
        if artifact.kind != "so":
            raise LaunchError(f"{artifact.path} is of kind '{artifact.kind}'; the host loads 'so'")
        return LoadedSharedObject(artifact, self)

    def synchronize(self) -> None:
        """Return at once: a host launch is synchronous."""


class LoadedSharedObject(Module):
    """A shared object; its code stays loaded until the process ends."""

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
        """See `Module`. The returned function is synchronous."""
        steps = []
        held = list(tensors.values())
        unwritten: list[torch.Tensor] = []
        for place, launch in enumerate(plan.launches):
            if launch.is_empty:
                continue
            shown = early_memory(plan, place, tensors)
            unwritten += [decoy.view(torch.uint8) for decoy in shown.values()]
            step = _Step(
                launch,
                self._function(launch.kernel),
                self._arguments(launch, {**tensors, **shown}, numbers),
                [(decoy.data_ptr(), _data(tensors, name), decoy.nbytes)
                 for name, decoy in shown.items()],
                EarlyWrites(plan, place, tensors, shown),
            )
            steps.append(step)
        device = self._device
        orders = itertools.cycle(device.orders)
        is_first = True

        def run(_held: Sequence[torch.Tensor | None] = held) -> None:
            nonlocal is_first
            seed = next(orders)
            for memory in unwritten:
                memory.fill_(_UNWRITTEN[seed % len(_UNWRITTEN)])
            for step in steps if is_first else ():
                step.early_writes.begin()
            for step in steps:
                try:
                    if is_first:
                        step.early_writes.demand_none(
                            partial(step.run, seed, device.threads, end_at_wait=True)
                        )
                    step.run(seed, device.threads)
                except HostFault as error:
                    where = f"{launch_text(step.launch)}, thread order {seed}"
                    refused = isinstance(error, HostRefusal)
                    kind = LaunchRefusedError if refused else LaunchError
                    raise kind(f"{error}\n  {where}") from None
            is_first = False

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


@dataclass(frozen=True)
class _Step:
    """A launch of a plan, bound to its memory.

    Attributes:
        launch: The launch.
        function: The kernel.
        arguments: Values of the kernel's parameters.
        early: The argument `early` of `HostFunction.launch`.
        early_writes: Finds what the kernel writes before its wait.
    """

    launch: Launch
    function: HostFunction
    arguments: Sequence[Any]
    early: Sequence[tuple[int, int, int]]
    early_writes: EarlyWrites

    def run(self, seed: int, threads: int, *, end_at_wait: bool = False) -> None:
        """Launch the kernel."""
        launch = self.launch
        self.function.launch(launch.grid, launch.block, launch.smem_bytes, self.arguments, seed,
                             threads, launch.pdl, self.early, end_at_wait)


def _data(tensors: Tensors, name: str) -> int:
    tensor = tensors[name]
    assert tensor is not None
    return tensor.data_ptr()
