"""From a call to its kernel: the table of the device, the ladder on a miss, the prepared launch.

A pass keeps one prepared launch per combination of shapes, strides, dtypes, device and pointer
alignment. The generated function of an operator looks it up and calls it; whatever it does not
find, or cannot serve at speed, comes here.

The ladder: the very problem that was tuned; else the nearest tuned problem whose compiled-in
dims and dtypes are the call's and whose conditions hold; else the operator's safe variant. The
table is the device's own, else that of a GPU of the same architecture. Nothing ever falls back
to eager PyTorch.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arguments import TORCH_DTYPES, Bound, Signature, bind, check_tensors, complete_dtypes
from .device import KernelFile, current_device, device_facts, raw_stream

# Pointers enter the lookup as the lowest bit set in any of them; conditions ask for no more.
ALIGNMENT = 64
# A server with many sequence lengths must not grow without bound; a refill costs microseconds.
MAX_PREPARED = 8192

# Tensor types that are served directly; any other (fake, functional, user subclass) goes through
# PyTorch's dispatcher, which knows what to do with it.
PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})

Run = Callable[..., None]  # (stream, *input pointers, *output pointers, *scalars)


# The state that sends a call through PyTorch's dispatcher; C functions, 20 ns each.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


class DispatchError(RuntimeError):
    """No kernel of the library serves the call."""


class Call(SimpleNamespace):
    """The numbers of a call by name: dims, strides, alignments of pointers.

    `call.M`, `call.x_stride_M` (elements), `call.x_ptr` (the pointer modulo 64, at worst).
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Row:
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
        evidence: `measured` on this GPU, or `predicted` without it.
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


@dataclass(frozen=True, slots=True)
class SafeRow:
    """The kernel that is right for every problem of a dtype combination."""

    dtypes: tuple[str, ...]
    kernel: str
    config: str
    bind: Callable[[KernelFile, Call, Mapping[str, int]], Run]


@dataclass(frozen=True, slots=True)
class Gpu:
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


@dataclass(frozen=True, slots=True)
class Choice:
    """What the ladder arrived at: a row and the step it stands on."""

    step: str  # "exact", "nearest", "safe"
    row: Row | SafeRow


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """Why a problem is served by a kernel; its text is for people."""

    function: str
    problem: str
    gpu: str
    same_gpu: bool
    step: str
    config: str
    kernel: str
    evidence: str
    tuned_problem: str = ""
    record: str = ""
    median_us: float | None = None

    def __repr__(self) -> str:
        where = self.gpu if self.same_gpu else f"{self.gpu} (same architecture)"
        lines = [f"{self.function}({self.problem}) on {where}: {self.step}",
                 f"  kernel    {self.config}, kernels/{self.kernel}.cu"]
        if self.median_us is None:
            lines.append(f"  evidence  {self.evidence}")
        else:
            lines.append(f"  evidence  {self.evidence}: {self.median_us:.2f} us at "
                         f"{self.tuned_problem}, record {self.record}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows for one device, and whose they are."""

    gpu: Gpu | None
    same_gpu: bool
    rows: tuple[Row, ...]
    facts: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass of an operator, with what it has prepared so far.

    Attributes:
        package: Package of the operator: `kgen_ops.rmsnorm`.
        name: `forward` or `backward`.
        signature: What it takes and returns.
        prepared: Lookup key of the generated function -> launch.
    """

    package: str
    name: str
    signature: Signature
    prepared: dict[Any, Run] = field(default_factory=dict)
    _tables: dict[Any, _Table] = field(default_factory=dict)
    _files: dict[Any, KernelFile] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def call(self, key: object, tensors: Sequence[Tensor], scalars: Sequence[float]) -> Any:
        """Serve a call that the generated function found no launch for, and remember it.

        Raises:
            TypeError, ValueError: If the arguments are not what the signature says.
            DispatchError: If the library has no kernel for the device.
        """
        if tensors[0].device.type == "meta":
            return self.dispatched(tensors, scalars)
        bound = bind(self.signature, tensors, scalars)
        device = tensors[0].device
        outputs = self._allocate(bound, device)
        if all(output.numel() == 0 for output in outputs):
            return _unpacked(outputs)
        if bound.copies:
            tensors = [
                tensor.contiguous() if argument.name in bound.copies else tensor
                for argument, tensor in zip(self.signature.inputs, tensors, strict=True)
            ]
            bound = bind(self.signature, tensors, scalars)
            key = None
        run = self._prepare(bound, tensors, device)
        if key is not None:
            if len(self.prepared) >= MAX_PREPARED:
                self.prepared.clear()
            self.prepared[key] = run
        pointers = (tensor.data_ptr() for tensor in (*tensors, *outputs))
        run(raw_stream(tensors[0].get_device()), *pointers, *scalars)
        return _unpacked(outputs)

    def dispatched(self, tensors: Sequence[Tensor], scalars: Sequence[float]) -> Any:
        """Serve a call through PyTorch's dispatcher: fake tensors, subclasses, modes, transforms.

        Raises:
            TypeError: If an argument is no tensor.
        """
        check_tensors(self.signature, tensors)
        return getattr(torch.ops.kgen_ops, self.signature.function)(*tensors, *scalars)

    def refuse_grad(self, tensors: Sequence[Tensor]) -> None:
        """Raise the error of a call that wants a gradient which was not generated."""
        wanting = [argument.name
                   for argument, tensor in zip(self.signature.inputs, tensors, strict=True)
                   if tensor.requires_grad]
        raise NotImplementedError(
            f"{self.signature.function}: {' and '.join(wanting)} requires grad, but no backward "
            "kernel was generated for this operator; call it under torch.no_grad(), or pass "
            f"{wanting[0]}.detach() if the gradient is not wanted"
        )

    def explain(self, dims: Mapping[str, int], dtypes: Mapping[str, str],
                device: torch.device) -> Explanation:
        """Say which kernel serves a contiguous, aligned call of these dims and dtypes.

        Raises:
            TypeError, ValueError: If a dim or dtype is missing or unknown.
            DispatchError: If the library has no kernel for the device.
        """
        signature = self.signature
        names = [dim.name for dim in signature.dims]
        if sorted(dims) != sorted(names):
            raise ValueError(f"{signature.function} has dims {', '.join(names)}; "
                             f"got {', '.join(dims) or 'none'}")
        extents = {name: dims[name] for name in names}
        chosen = complete_dtypes(signature, dict(dtypes))
        call = Call(**extents, **_contiguous_strides(signature, extents),
                    **{f"{a.name}_ptr": 0 for a in (*signature.inputs, *signature.outputs)})
        table = self._table(device)
        choice = self._choose(table, tuple(extents.values()), tuple(chosen.values()), call)
        row = choice.row
        explanation = Explanation(
            function=signature.function,
            problem=_problem(signature, tuple(extents.values()), tuple(chosen.values())),
            gpu=table.gpu.name if table.gpu else str(device),
            same_gpu=table.same_gpu,
            step=choice.step,
            config=row.config,
            kernel=row.kernel,
            evidence="right for every problem, tuned for none",
        )
        if isinstance(row, SafeRow):
            return replace(explanation, same_gpu=True)
        return replace(explanation, evidence=row.evidence, record=row.record,
                       tuned_problem=_problem(signature, row.dims, row.dtypes),
                       median_us=row.median_us)

    def _prepare(self, bound: Bound, tensors: Sequence[Tensor], device: torch.device) -> Run:
        low = 0
        for tensor in tensors:
            low |= tensor.data_ptr()
        low &= -low & (ALIGNMENT - 1)
        pointers = {f"{a.name}_ptr": low for a in self.signature.inputs}
        # Outputs are fresh from PyTorch's allocators, which align to at least 64 bytes.
        pointers |= {f"{a.name}_ptr": 0 for a in self.signature.outputs}
        call = Call(**bound.dims, **bound.strides, **pointers)
        with self._lock:
            table = self._table(device)
            choice = self._choose(
                table, tuple(bound.dims.values()), tuple(bound.dtypes.values()), call
            )
            file = self._file(choice.row.kernel, device)
            if isinstance(choice.row, SafeRow):
                run = choice.row.bind(file, call, table.facts)
            else:
                run = choice.row.bind(file, call)
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            return _on_device(run, tensors[0].get_device())
        return run

    def _choose(self, table: _Table, dims: tuple[int, ...], dtypes: tuple[str, ...],
                call: Call) -> Choice:
        best: Row | None = None
        least = inf
        for row in table.rows:
            if row.dtypes != dtypes or not self._same_constants(row, dims):
                continue
            far = sum(abs(log(max(a, 1) / max(b, 1))) for a, b in zip(dims, row.dims, strict=True))
            if far < least and row.fits(call):
                best, least = row, far
        if best is not None:
            return Choice("exact" if best.dims == dims else "nearest", best)
        safe: Sequence[SafeRow] = getattr(
            importlib.import_module(f"{self.package}.safe"), self.name.upper(), ()
        )
        for candidate in safe:
            if candidate.dtypes == dtypes:
                return Choice("safe", candidate)
        problem = _problem(self.signature, dims, dtypes)
        raise DispatchError(
            f"{self.signature.function}: the library has no kernel for {problem}\n"
            f"  run: kgen tune --op {self._operator} --problem {problem}"
        )

    def _same_constants(self, row: Row, dims: tuple[int, ...]) -> bool:
        return all(
            extent == tuned
            for dim, extent, tuned in zip(self.signature.dims, dims, row.dims, strict=True)
            if dim.name in row.constants
        )

    def _table(self, device: torch.device) -> _Table:
        key = (device.type, device.index)
        if key not in self._tables:
            self._tables[key] = self._load_table(device)
        return self._tables[key]

    def _load_table(self, device: torch.device) -> _Table:
        gpus: Sequence[Gpu] = importlib.import_module(f"{self.package}.tables").GPUS
        if device.type == "cpu":
            host = next((gpu for gpu in gpus if gpu.arch == "host"), None)
            if host is None:
                tuned = ", ".join(gpu.name for gpu in gpus) or "nothing"
                raise DispatchError(
                    f"{self.signature.function}: this is a CPU tensor, but only {tuned} was tuned\n"
                    f"  run: kgen tune --op {self._operator} --gpu host, or move the tensors"
                )
            return _Table(host, True, self._rows(host), host.facts)
        if device.type != "cuda":
            raise DispatchError(f"{self.signature.function}: tensors on {device} are not served; "
                                "move them to a CUDA GPU")
        facts = device_facts(device)
        name = torch.cuda.get_device_name(device)
        for gpu in gpus:
            if name in gpu.device_names:
                return _Table(gpu, True, self._rows(gpu), facts)
        kin = [gpu for gpu in gpus if gpu.compute_capability == facts["compute_capability"]]
        if kin:
            nearest = min(kin, key=lambda g: abs(g.facts["sm_count"] - facts["sm_count"]))
            return _Table(nearest, False, self._rows(nearest), facts)
        return _Table(None, False, (), facts)

    def _rows(self, gpu: Gpu) -> tuple[Row, ...]:
        table = importlib.import_module(f"{self.package}.tables.{gpu.name}")
        rows: tuple[Row, ...] = getattr(table, self.name.upper(), ())
        return rows

    def _file(self, stem: str, device: torch.device) -> KernelFile:
        key = (stem, device.type, device.index)
        if key not in self._files:
            folder = Path(importlib.import_module(self.package).__path__[0])
            self._files[key] = KernelFile(folder.parent, folder / "kernels", stem, device)
        return self._files[key]

    def _allocate(self, bound: Bound, device: torch.device) -> list[Tensor]:
        return [
            torch.empty(shape, device=device,
                        dtype=TORCH_DTYPES[bound.dtypes.get(output.dtype, output.dtype)])
            for shape, output in zip(bound.shapes, self.signature.outputs, strict=True)
        ]

    @property
    def _operator(self) -> str:
        return self.package.rpartition(".")[2]


def always(call: Call) -> bool:
    """Serve as the conditions of a kernel that has none."""
    return True


def _unpacked(outputs: list[Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _on_device(run: Run, device: int) -> Run:
    """Launch on `device` even while another one is current."""

    def run_there(stream: int, *arguments: float) -> None:
        if current_device() == device:
            run(stream, *arguments)
        else:
            with torch.cuda.device(device):
                run(stream, *arguments)

    return run_there


def _contiguous_strides(signature: Signature, dims: Mapping[str, int]) -> dict[str, int]:
    strides: dict[str, int] = {}
    for argument in signature.inputs:
        step = 1
        for name in reversed(argument.dims):
            if name in argument.free_strides:
                strides[f"{argument.name}_stride_{name}"] = step
            step *= dims[name]
    return strides


def _problem(signature: Signature, dims: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
    pairs = [
        *zip((dim.name for dim in signature.dims), dims, strict=True),
        *zip((f.name for f in signature.dtypes), dtypes, strict=True),
    ]
    return ",".join(f"{name}={value}" for name, value in pairs)
