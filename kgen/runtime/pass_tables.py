"""The dispatch tables of one pass and the kernels that it has loaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .errors import DispatchError, FamilyError
from .gpus import Table, gpu_of
from .integrity import IntegrityError, checked_module
from .problems import not_loaded
from .rows import DispatchRule, Family, Gpu, Row, SafeRow
from .streams import capturing

HOST = "host"  # the architecture of the CPU

if TYPE_CHECKING:
    from .device import KernelFile
    from .families import Instance
    from .ranking import Ranking


class PassTables:
    """The dispatch tables of one pass, imported at the first use, and its loaded kernels.

    Attributes:
        package: Package of the operator: `kgen_ops.rmsnorm`.
        name: `forward` or `backward`.
        function: Name of the public function.
        files: The kernels that are loaded, by file stem and device.
    """

    def __init__(self, package: str, name: str, function: str) -> None:
        self.package = package
        self.name = name
        self.function = function
        self.files: dict[tuple[str, str, int | None], KernelFile] = {}
        self._tables: dict[tuple[str, int | None], Table] = {}
        self._families: Mapping[str, Family] | None = None

    @property
    def _folder(self) -> Path:
        """The operator's folder."""
        return Path(importlib.import_module(self.package).__path__[0])

    @property
    def operator(self) -> str:
        """Name of the operator: `rmsnorm`."""
        return self.package.rpartition(".")[2]

    @property
    def library(self) -> str:
        """Name of the library: `kgen_ops`."""
        return self.package.rpartition(".")[0]

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that the operator was tuned for.

        Raises:
            IntegrityError: If a table differs from the library's list of files; the methods below
                raise it likewise.
        """
        gpus: tuple[Gpu, ...] = checked_module(self.package, "tables").GPUS
        return gpus

    def tuned_for_host(self) -> bool:
        """Whether the operator has kernels for the CPU."""
        return any(gpu.arch == HOST for gpu in self.gpus())

    def rows(self, gpu: Gpu) -> tuple[Row, ...]:
        """Return the measured rows of this pass on a GPU."""
        table = checked_module(self.package, f"tables.{gpu.name}")
        rows: tuple[Row, ...] = getattr(table, self.name.upper(), ())
        return rows

    def rules(self, gpu: Gpu) -> tuple[DispatchRule, ...]:
        """Return the rules of this pass that were learnt on a GPU."""
        table = checked_module(self.package, f"tables.{gpu.name}")
        rules: tuple[DispatchRule, ...] = getattr(table, f"{self.name.upper()}_RULES", ())
        return rules

    def safe_rows(self) -> tuple[SafeRow, ...]:
        """Return the safe kernels of this pass, one per combination of dtypes."""
        safe = checked_module(self.package, "safe")
        rows: tuple[SafeRow, ...] = getattr(safe, self.name.upper(), ())
        return rows

    def families(self) -> Mapping[str, Family]:
        """Return the families of this pass by variant.

        Empty if the library has no families, or if its headers have changed since the families were
        written; `kgen emit` writes them again.
        """
        if self._families is None:
            from .device import headers_digest

            self._families = {}
            root = self._folder.parent
            if (self._folder / "families.py").exists():
                module = checked_module(self.package, "families")
                if headers_digest(root) == module.HEADERS:
                    found: tuple[Family, ...] = getattr(module, self.name.upper(), ())
                    self._families = {family.name: family for family in found}
        return self._families

    def ranking(self, gpu: Gpu) -> Ranking | None:
        """Return the model that ranks configs of this pass on a GPU; None if none was learnt."""
        name = f"ranking_{gpu.name}"
        if not (self._folder / f"{name}.py").exists():
            return None
        module = checked_module(self.package, name)
        if owner := getattr(module, "SAME_AS", ""):  # another operator of the family has the model
            module = checked_module(f"{self.library}.{owner}", name)
        found: Ranking | None = getattr(module, self.name.upper(), None)
        return found

    def of_device(self, device: torch.device) -> Table:
        """Return the table that serves a device: of its own model, or of a similar GPU.

        Raises:
            DispatchError: If the library has no kernel for the device.
        """
        key = (device.type, device.index)
        if key not in self._tables:
            self._tables[key] = self.of_gpu(
                *gpu_of(self.function, self.operator, self.gpus(), device)
            )
        return self._tables[key]

    def of_gpu(self, gpu: Gpu | None, same_gpu: bool, facts: Mapping[str, int]) -> Table:
        """Return the table of a GPU.

        If the GPU has no table, or only predicted rows, the result includes the measured rows of
        other GPUs as starting points (`Table.lent`).
        """
        rows = () if gpu is None else self.rows(gpu)
        if gpu is not None and (not rows or any(not row.is_predicted for row in rows)):
            return Table(gpu, same_gpu, rows, self.rules(gpu), facts)
        # A predicted row is valid for one problem only. For other problems, measured rows of other
        # GPUs are better starting points.
        lent = (row for other in self.gpus() if other.arch != HOST
                for row in self.rows(other) if not row.is_predicted)
        return Table(gpu, same_gpu, rows, (), facts, tuple(lent))

    def file(self, stem: str, device: torch.device, problem: str) -> KernelFile:
        """Return a kernel file, loaded on a device.

        Args:
            stem: The stem of the file in `kernels/`.
            device: The device that will run the kernel.
            problem: The problem of the call; for the error.
        Raises:
            DispatchError: If the file is not loaded yet and a CUDA graph is being captured.
        """
        return self._loaded(stem, None, device, problem)

    def instance(
        self, instance: Instance, dims: Mapping[str, int], choices: Mapping[str, str],
        device: torch.device, problem: str,
    ) -> tuple[str, KernelFile]:
        """Render and compile a family for a problem, or find what was compiled before.

        Args:
            instance: A family of this pass, and its config.
            dims: Every dim of the problem.
            choices: Every dtype field and option of the problem.
            device: The device that will run the kernel.
            problem: The problem of the call; for the error.
        Returns:
            The name of the kernel's file, and the kernel.
        Raises:
            DispatchError: If it is not compiled yet and a CUDA graph is being captured.
            FamilyError: If it cannot be rendered, compiled or loaded here.
        """
        from .families import source

        stem, text = source(self._folder.parent, instance, dims, choices)
        try:
            return stem, self._loaded(stem, text, device, problem)
        except (DispatchError, IntegrityError):
            raise
        except (RuntimeError, OSError) as trouble:
            raise FamilyError(f"{instance.config}: {trouble}") from None

    def _loaded(
        self, stem: str, text: bytes | None, device: torch.device, problem: str
    ) -> KernelFile:
        # Importing compilers and the driver takes 10 ms; a cached launch needs neither.
        from .device import KernelFile

        key = (stem, device.type, device.index)
        if key not in self.files:
            if device.type == "cuda" and capturing():
                raise DispatchError(not_loaded(
                    self.library, self.operator, self.name, problem, device
                ))
            self.files[key] = KernelFile(
                self._folder.parent, self._folder / "kernels", stem, device, text)
        return self.files[key]
