"""Run a sanitized build: each launch in a process of its own, under AddressSanitizer.

AddressSanitizer must be the first library that a process loads, which is impossible in a Python
process. The kernel is therefore a stand-alone executable, and tensors are passed in files. Each
buffer is exactly as large as the span of its tensor, so that AddressSanitizer finds an access one
element beyond it.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kgen.errors import LaunchError
from kgen.launch.base import Module, resolve
from kgen.launch.host_jobs import BufferRef, JobLaunch, run_job, write_job
from kgen.model.artifact import Artifact
from kgen.model.plan import Plan
from kgen.model.spread_source import in_source, source_of
from kgen.runtime.cache import read_file
from kgen.runtime.host import HostFault

if TYPE_CHECKING:
    from kgen.launch.base import Tensors

RUN_TIMEOUT_S = 120.0


class SanitizedModule(Module):
    """An executable of one rendered source."""

    def __init__(
        self, artifact: Artifact, device: torch.device, seed: int, comparisons: Path | None = None
    ) -> None:
        """Name the executable; nothing is loaded.

        Args:
            artifact: The executable.
            device: The device of the tensors.
            seed: Seed of the order in which a block's threads run.
            comparisons: File for the comparisons of launches, as in `run_job`.
        """
        super().__init__(artifact)
        self._device = device
        self._seed = seed
        self._comparisons = comparisons

    def bind(
        self, plan: Plan, tensors: Tensors, numbers: Mapping[str, int | float]
    ) -> Callable[[], None]:
        """See `Module`. The returned function is synchronous."""
        launches = [x for x in plan.launches if not x.is_empty]
        used: dict[int, torch.Tensor] = {}  # by address, so that launches share a buffer
        jobs: list[JobLaunch] = []
        for launch in launches:
            args: list[Any] = []
            for value in resolve(launch, tensors, numbers, self._device):
                if isinstance(value, torch.Tensor):
                    used.setdefault(value.data_ptr(), value)
                    args.append(BufferRef(list(used).index(value.data_ptr())))
                elif value is None:
                    args.append(ctypes.c_void_p(None))
                elif isinstance(value, int):
                    args.append(ctypes.c_longlong(value))
                else:
                    args.append(ctypes.c_float(value))
            jobs.append(
                JobLaunch(launch.kernel, launch.grid, launch.block, launch.smem_bytes, args,
                          self._seed)
            )

        kept = {t.data_ptr() for name, t in tensors.items() if name in self.constant and
                t is not None}

        def run() -> None:
            if not jobs:
                return
            with tempfile.TemporaryDirectory(prefix="kgen-asan-") as folder:
                contents = [ctypes.string_at(p, _span_bytes(t)) for p, t in used.items()]
                constant = [i for i, pointer in enumerate(used) if pointer in kept]
                try:
                    outputs = run_job(
                        self.artifact.path, write_job(folder, contents, jobs, constant),
                        RUN_TIMEOUT_S, self._comparisons,
                    )
                except HostFault as fault:
                    raise LaunchError(self._in_source(str(fault))) from None
            for (pointer, tensor), content in zip(used.items(), outputs, strict=True):
                ctypes.memmove(pointer, content, _span_bytes(tensor))

        return run

    def _in_source(self, report: str) -> str:
        """A report with places in the kernel's source instead of the spread source."""
        if not (source := source_of(read_file(self.artifact.path))):
            return report
        return in_source(report, f"{self.artifact.key}.cu", source)

    def occupancy(self, kernel: str, threads: int, smem_bytes: int) -> int:
        """See `Module`: one block at a time."""
        return 1

    def close(self) -> None:
        """Do nothing, because nothing is loaded."""


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((extent - 1) * stride for extent, stride in steps) + 1) * tensor.element_size()
