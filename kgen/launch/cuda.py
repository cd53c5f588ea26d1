"""Launch on a GPU through the driver, in torch's context and on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kgen.errors import LaunchError, LaunchRefusedError
from kgen.launch.base import Device, Module, check_parameters, codes_of, launch_text, resolve
from kgen.model.artifact import Artifact
from kgen.model.plan import Launch, Plan
from kgen.runtime import cuda
from kgen.runtime.cache import read_file
from kgen.runtime.cuda import COOPERATIVE_LAUNCH_TOO_LARGE, CudaError
from kgen.runtime.launcher import Launcher, make_launcher

if TYPE_CHECKING:
    from kgen.launch.base import Tensors

# Errors after which nothing has run: invalid value, out of memory (for instance for a kernel's
# local memory), out of resources, cooperative launch too large.
_REFUSALS = (1, 2, 701, COOPERATIVE_LAUNCH_TOO_LARGE)


class CudaDevice(Device):
    """One GPU."""

    def __init__(self, ordinal: int = 0) -> None:
        """Use a GPU's primary context.

        Args:
            ordinal: Number of the GPU as torch counts.
        Raises:
            LaunchError: If torch or the driver cannot use the GPU.
        """
        if not torch.cuda.is_available():
            raise LaunchError("this torch cannot use CUDA\n  next: install a CUDA build of torch, "
                              "or choose --gpu host")
        self.ordinal = ordinal
        self._torch_device = torch.device("cuda", ordinal)
        try:
            cuda.driver().primary_context(ordinal)
        except CudaError as error:
            raise LaunchError(str(error)) from None

    @property
    def torch_device(self) -> torch.device:
        """See `Device`."""
        return self._torch_device

    def load(self, artifact: Artifact) -> LoadedCubin:
        """See `Device`."""
        if artifact.kind != "cubin":
            raise LaunchError(f"{artifact.path} is of kind '{artifact.kind}'; a GPU loads 'cubin'")
        return LoadedCubin(artifact, self)

    def synchronize(self) -> None:
        """See `Device`."""
        try:
            cuda.driver().synchronize(self.ordinal)
        except CudaError as error:
            raise LaunchError(str(error)) from None


class LoadedCubin(Module):
    """A cubin on one GPU."""

    def __init__(self, artifact: Artifact, device: CudaDevice) -> None:
        """Load the cubin; see `CudaDevice.load`."""
        super().__init__(artifact)
        self._device = device
        self._launchers: dict[object, Launcher] = {}
        try:
            self._module = cuda.CudaModule(read_file(artifact.path), device.ordinal, artifact.path)
        except (CudaError, OSError) as error:
            raise LaunchError(str(error)) from None

    def bind(
        self, plan: Plan, tensors: Tensors, numbers: Mapping[str, int | float]
    ) -> Callable[[], None]:
        """See `Module`."""
        steps = [self._prepare(launch, tensors, numbers)
                 for launch in plan.launches if not launch.is_empty]
        ordinal = self._device.ordinal
        current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        held = tuple(tensors.values())

        def run(_held: tuple[torch.Tensor | None, ...] = held) -> None:
            stream = current_stream(ordinal)
            try:
                for launcher, arguments in steps:
                    launcher(stream, *arguments)
            except CudaError as error:
                kind = LaunchRefusedError if error.code in _REFUSALS else LaunchError
                raise kind(str(error)) from None

        return run

    def occupancy(self, kernel: str, threads: int, smem_bytes: int) -> int:
        """See `Module`."""
        try:
            function = self._module.function(kernel)
            function.allow_smem(smem_bytes)
            return function.blocks_per_sm(threads, smem_bytes)
        except CudaError as error:
            raise LaunchError(f"{error}\n  kernel {kernel}, {threads} threads, {smem_bytes} bytes "
                              "of dynamic shared memory") from None

    def close(self) -> None:
        """See `Module`."""
        try:
            self._module.unload()
        except CudaError as error:
            raise LaunchError(str(error)) from None

    def _prepare(
        self, launch: Launch, tensors: Tensors, numbers: Mapping[str, int | float]
    ) -> tuple[Launcher, tuple[Any, ...]]:
        """Return a launcher and its arguments except the stream."""
        values = resolve(launch, tensors, numbers, self._device.torch_device)
        codes = codes_of(values)
        key = (launch.kernel, codes, launch.block, launch.smem_bytes,
               launch.pdl)
        known = (key, launch.blocks if launch.coresident else 0)
        if known not in self._launchers:  # one launcher serves all buffer sets of a measurement
            try:
                function = self._module.function(launch.kernel)
                check_parameters(launch, codes, function.parameter_bytes())
                function.allow_smem(launch.smem_bytes)
                if launch.coresident:
                    function.demand_room(launch.blocks, launch.threads, launch.smem_bytes)
                self._launchers[known] = make_launcher(
                    function, *key[1:], launch.coresident)
            except (CudaError, ValueError) as error:
                refused = getattr(error, "code", None) in _REFUSALS
                kind = LaunchRefusedError if refused else LaunchError
                raise kind(f"{error}\n  {launch_text(launch)}") from None
        launcher = self._launchers[known]
        arguments = [v.data_ptr() if isinstance(v, torch.Tensor) else v or 0 for v in values]
        return launcher, (*launch.grid, *arguments)
