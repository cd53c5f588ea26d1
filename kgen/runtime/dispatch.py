"""From a call to its kernel: what is checked, allocated and prepared, and how it is launched.

A pass keeps one prepared launch per combination of shapes, strides, dtypes, device and pointer
alignment. The generated function of an operator looks it up and calls it; whatever it does not
find, or cannot serve at speed, comes here. Which row then serves it, `ladder.py` says.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .allocation import allocator
from .arguments import (
    ABSENT,
    TORCH_DTYPES,
    Bound,
    Signature,
    bind,
    check_tensors,
    complete_dtypes,
)
from .autocast import any_autocast, promoted
from .gradients import Gradient, refuse_grad
from .integrity import checked_module
from .ladder import DispatchError, Table, choose, explanation, lender
from .problems import Explanation, contiguous_call, not_loaded, problem_text
from .quick import Ready, ready_call
from .rows import Call, Gpu, Prepared, Recorded, Row, Rule, Run, SafeRow, bound_row
from .streams import (
    capturing,
    current_device,
    on_device,
    raw_stream,
    several_devices,
    stream_getter,
)

if TYPE_CHECKING:
    from .device import KernelFile

# Pointers enter the lookup modulo this many bytes; conditions ask for no more.
ALIGNMENT = 32
# A server with many sequence lengths must not grow without bound; a refill costs microseconds.
MAX_PREPARED = 8192
# How many are asked, 0.1 us each, before a call turns to `prepared`, and how many calls that none
# of them served it takes to replace one.
MAX_READY = 4
REPLACED_EVERY = 64

# Tensor types that are served directly; any other (fake, functional, user subclass) goes through
# PyTorch's dispatcher, which knows what to do with it.
PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})
PLAIN_OR_NONE = PLAIN_TENSORS | {type(None)}

# The state that sends a call through PyTorch's dispatcher; C functions, 20 ns each.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


class Pass:
    """One pass of an operator, with what it has prepared so far.

    Attributes:
        package: Package of the operator: `kgen_ops.rmsnorm`.
        name: `forward` or `backward`.
        signature: What it takes and returns.
        differentiable: Of a forward pass: whether kgen has a backward pass of the operator.
        prepared: Lookup key of the generated function -> what a call needs.
        ready: Which tensors are given, and what flags -> what serves such calls if their tensors
            are like those of an earlier one; see `quick.py`.
        run: The generated function's part behind all checks; set when it is registered.
        gradient: Of a forward pass, if the library has the backward pass, too.
    """

    run: Callable[..., Any]
    gradient: Gradient | None = None

    def __init__(
        self, package: str, name: str, signature: Signature, differentiable: bool = True
    ) -> None:
        self.package = package
        self.name = name
        self.differentiable = differentiable
        self.signature = signature
        self.prepared: dict[Any, Prepared] = {}
        self.ready: dict[Any, tuple[Ready, ...]] = {}
        self._not_ready = 0
        self._never_ready = False
        self._tables: dict[tuple[str, int | None], Table] = {}
        self._files: dict[tuple[str, str, int | None], KernelFile] = {}
        self._lock = threading.RLock()

    def call(
        self, key: object, tensors: Sequence[Tensor | None], scalars: Sequence[float],
        flags: Sequence[bool | str] = (),
    ) -> Any:
        """Serve a call that the generated function found no launch for, and remember it.

        Args:
            key: What to remember the launch by.
            tensors: One per input; None for one that is left out.
            scalars: One per scalar.
            flags: Whether each optional output that no input decides is wanted; then the choice of
                each option.
        Returns:
            The outputs that there are: one tensor, or a tuple.
        Raises:
            TypeError, ValueError: If the arguments are not what the signature says.
            DispatchError: If the library has no kernel for the device.
        """
        if isinstance(tensors[0], Tensor) and tensors[0].device.type == "meta":
            return self.dispatched(tensors, scalars, flags)
        if any_autocast():
            cast = promoted(self.signature, tensors)
            if any(new is not old for new, old in zip(cast, tensors, strict=True)):
                return self.run(*cast, *scalars, *flags)
        bound = bind(self.signature, tensors, scalars, flags)
        first = tensors[0]
        assert first is not None  # bind has refused None
        device = first.device
        outputs = self._allocate(bound, device)
        found = unpacked([output for output in outputs if output is not None])
        if all(output is None or output.numel() == 0 for output in outputs):
            return found
        if bound.copies:
            tensors = [
                tensor.contiguous() if tensor is not None and argument.name in bound.copies
                else tensor
                for argument, tensor in zip(self.signature.inputs, tensors, strict=True)
            ]
            bound = bind(self.signature, tensors, scalars, flags)
            key = None
        run, record = self._prepare(bound, tensors, device)
        if key is not None:
            if len(self.prepared) >= MAX_PREPARED:
                self.forget()
            index = first.get_device()
            self.prepared[key] = Prepared(run, stream_getter(index), index, tuple(
                None if made is None
                else allocator(tuple(made.shape), made.stride(), made.dtype, device)
                for made in outputs
            ), record)
        pointers = (0 if t is None else t.data_ptr() for t in (*tensors, *outputs))
        run(raw_stream(first.get_device()), *pointers, *scalars)
        return found

    def ready_next_time(
        self, given: object, prepared: Prepared, *tensors: Tensor | None
    ) -> None:
        """Have calls with tensors like these served without asking each for its layout.

        Args:
            given: Which tensors are given, and what flags.
            prepared: What the call needs.
            tensors: One per input; None for one that is left out. Calls are served if theirs are
                aligned.
        """
        if self._never_ready:
            return
        ready = self.ready.get(given, ())
        if len(ready) == MAX_READY:
            # Many layouts take turns. To make a new one costs more than it saves once, so that it
            # rarely takes the place of the oldest.
            self._not_ready += 1
            if self._not_ready % REPLACED_EVERY:
                return
            ready = ready[1:]
        there = [tensor for tensor in tensors if tensor is not None]
        if any(tensor.data_ptr() % ALIGNMENT for tensor in there):
            return  # one for such a layout may be there, and refuses this call for its addresses
        if len({id(tensor) for tensor in there}) < len(there):
            return  # it would serve no call, this one neither, and take another's place
        if several_devices(prepared.device) and current_device() != prepared.device:
            return  # nor does one while another device is the current one
        if (new := ready_call(tensors, prepared, ALIGNMENT)) is None:
            self._never_ready = True
        else:
            self.ready[given] = (*ready, new)

    def forget(self) -> None:
        """Forget all prepared launches; the next calls prepare them again."""
        self.ready.clear()
        self._never_ready = False
        self.prepared.clear()

    def dispatched(
        self, tensors: Sequence[Tensor | None], scalars: Sequence[float],
        flags: Sequence[bool | str] = (),
    ) -> Any:
        """Serve a call through PyTorch's dispatcher: fake tensors, subclasses, modes, transforms.

        Raises:
            TypeError: If an argument is no tensor.
        """
        check_tensors(self.signature, tensors)
        operator = getattr(torch.ops.kgen_ops, self.signature.function)
        if self.gradient is not None and transforms() and torch.is_grad_enabled():
            # torch.func takes gradients above the dispatcher alone.
            return unpacked(self.gradient.transformed.apply(operator, *tensors, *scalars, *flags))
        return unpacked(operator(*tensors, *scalars, *flags))

    def recorded(self, run: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """Serve a call that wants a gradient, so that autograd will find one.

        Args:
            run: Computes the outputs of such arguments.
            arguments: All of the call, in the order of the generated function.
        Returns:
            The outputs that there are.
        Raises:
            NotImplementedError: If the library has no backward pass for this one.
        """
        if self.gradient is None:
            if self.name != "forward":
                why = "its results have no gradients: operators are differentiable once"
            elif not self.differentiable:
                why = f"{self._operator} has no backward pass: write it in plain PyTorch"
            else:
                why = (f"the library has no {self._operator}_backward\n"
                       f"  run: kgen tune --op {self._operator} --pass backward --gpu auto")
            refuse_grad(self.signature, arguments, why)
        count = len(self.signature.inputs)
        if any_autocast():  # autograd has to see what is cast
            arguments = (*promoted(self.signature, arguments[:count]), *arguments[count:])
        made: tuple[Tensor, ...] = self.gradient.function.apply(run, *arguments)
        return made

    def explain(self, dims: Mapping[str, int], dtypes: Mapping[str, str],
                device: torch.device | Gpu) -> Explanation:
        """Say which kernel serves a contiguous, aligned call of these dims and dtypes.

        Args:
            dims: Every dim, by name.
            dtypes: By field; options, too.
            device: Where the call would run; a GPU of `gpus()` need not be in this machine.
        Raises:
            TypeError, ValueError: If a dim or dtype is missing or unknown.
            DispatchError: If the library has no kernel for the device.
        """
        signature = self.signature
        names = [dim.name for dim in signature.dims]
        if (packing := signature.packing) is not None and packing.batch in dims:
            dims = {packing.sequences: dims[packing.batch], **dims}
        if sorted(dims) != sorted(names):
            raise ValueError(f"{signature.function} has dims {', '.join(names)}; "
                             f"got {', '.join(dims) or 'none'}")
        extents = {name: dims[name] for name in names}
        chosen = complete_dtypes(signature, dict(dtypes))
        call = contiguous_call(signature, extents)
        if isinstance(device, Gpu):
            table = self._table_of(device, True, device.facts)
        else:
            table = self._table(device)
        dtype_names = tuple(chosen.values())
        choice = choose(signature, self._operator, table, self.safe_rows,
                        tuple(extents.values()), dtype_names, call)
        return explanation(signature, table, choice, extents, dtype_names, str(device))

    def warm(self, dims: Mapping[str, int], dtypes: Mapping[str, str],
             device: torch.device) -> Explanation:
        """Load the kernel that `explain` names.

        Raises:
            TypeError, ValueError, DispatchError: As `explain` does.
        """
        why = self.explain(dims, dtypes, device)
        with self._lock:
            self._file(why.kernel, device, why.problem)
        return why

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that the operator was tuned for.

        Raises:
            IntegrityError: If their index is not what the library's list says; so do the others.
        """
        gpus: tuple[Gpu, ...] = checked_module(self.package, "tables").GPUS
        return gpus

    def rows(self, gpu: Gpu) -> tuple[Row, ...]:
        """Return the measured rows of this pass on a GPU."""
        table = checked_module(self.package, f"tables.{gpu.name}")
        rows: tuple[Row, ...] = getattr(table, self.name.upper(), ())
        return rows

    def rules(self, gpu: Gpu) -> tuple[Rule, ...]:
        """Return the rules of this pass that were learnt on a GPU."""
        table = checked_module(self.package, f"tables.{gpu.name}")
        rules: tuple[Rule, ...] = getattr(table, f"{self.name.upper()}_RULES", ())
        return rules

    def safe_rows(self) -> tuple[SafeRow, ...]:
        """Return the safe kernels of this pass, one per combination of dtypes."""
        safe = checked_module(self.package, "safe")
        rows: tuple[SafeRow, ...] = getattr(safe, self.name.upper(), ())
        return rows

    def rows_on(self, device: torch.device) -> tuple[Row, ...]:
        """Return the measured rows that serve a device: its own, or those of its kin.

        Raises:
            DispatchError: If the library has no kernel for the device.
        """
        return self._table(device).rows

    def run_row(
        self, row: Row | SafeRow, tensors: Sequence[Tensor | None], scalars: Sequence[float],
        flags: Sequence[bool | str] = (),
    ) -> list[Tensor | None]:
        """Run the kernel of a row, whatever the ladder would choose; see `call`.

        Returns:
            One tensor per output; None for one that is not there.
        """
        bound = bind(self.signature, tensors, scalars, flags)
        first = tensors[0]
        assert first is not None  # bind has refused None
        outputs = self._allocate(bound, first.device)
        run, _ = self._bind_row(row, bound, self._call(bound, tensors),
                                self._table(first.device).facts, first.device)
        pointers = (0 if t is None else t.data_ptr() for t in (*tensors, *outputs))
        run(raw_stream(first.get_device()), *pointers, *scalars)
        return outputs

    def _prepare(
        self, bound: Bound, tensors: Sequence[Tensor | None], device: torch.device
    ) -> tuple[Run, Callable[[], Recorded]]:
        call = self._call(bound, tensors)
        with self._lock:
            table = self._table(device)
            choice = choose(self.signature, self._operator, table, self.safe_rows,
                            tuple(bound.dims.values()), tuple(bound.dtypes.values()), call)
            return self._bind_row(choice.row, bound, call, table.facts, device)

    def _call(self, bound: Bound, tensors: Sequence[Tensor | None]) -> Call:
        pointers = {f"{argument.name}_ptr": 0 if tensor is None else tensor.data_ptr() % ALIGNMENT
                    for argument, tensor in zip(self.signature.inputs, tensors, strict=True)}
        # Outputs are fresh from PyTorch's allocators, which align to at least 64 bytes.
        pointers |= {f"{a.name}_ptr": 0 for a in self.signature.outputs}
        return Call(**bound.dims, **bound.strides, **pointers)

    def _bind_row(self, row: Row | SafeRow, bound: Bound, call: Call,
                  facts: Mapping[str, int], device: torch.device
                  ) -> tuple[Run, Callable[[], Recorded]]:
        """The launch of a row for such calls, and what writes it down."""
        problem = problem_text(
            self.signature, tuple(bound.dims.values()), tuple(bound.dtypes.values())
        )
        file = self._file(row.kernel, device, problem)
        record = functools.partial(
            _recorded, row, file, call, facts,
            tensors=len(self.signature.inputs) + len(self.signature.outputs),
            scalars=len(self.signature.scalars),
        )
        run = bound_row(row, file, call, facts)
        if device.type == "cuda" and several_devices(device.index):
            run = on_device(run, device.index)
        return run, record

    def _table(self, device: torch.device) -> Table:
        key = (device.type, device.index)
        if key not in self._tables:
            self._tables[key] = self._table_of(
                *lender(self.signature.function, self._operator, self.gpus(), device)
            )
        return self._tables[key]

    def _table_of(self, gpu: Gpu | None, same_gpu: bool, facts: Mapping[str, int]) -> Table:
        if gpu is None:
            return Table(None, same_gpu, (), (), facts)
        return Table(gpu, same_gpu, self.rows(gpu), self.rules(gpu), facts)

    def _file(self, stem: str, device: torch.device, problem: str) -> KernelFile:
        """The loaded kernel file; loads it unless a CUDA graph is captured.

        Raises:
            DispatchError: If it would have to be loaded into a capture.
        """
        # Compilers and the driver are only needed from here on; importing them takes 10 ms.
        from .device import KernelFile

        key = (stem, device.type, device.index)
        if key not in self._files:
            if device.type == "cuda" and capturing():
                raise DispatchError(not_loaded(
                    self._library, self._operator, self.name, problem, device
                ))
            folder = Path(importlib.import_module(self.package).__path__[0])
            self._files[key] = KernelFile(folder.parent, folder / "kernels", stem, device)
        return self._files[key]

    def _allocate(self, bound: Bound, device: torch.device) -> list[Tensor | None]:
        outputs: list[Tensor | None] = []
        for shape, layout, output in zip(
            bound.shapes, bound.layouts, self.signature.outputs, strict=True
        ):
            dtype = bound.dtypes.get(output.dtype, output.dtype)
            if dtype == ABSENT:
                outputs.append(None)
            elif layout is None:
                outputs.append(torch.empty(shape, device=device, dtype=TORCH_DTYPES[dtype]))
            else:
                outputs.append(torch.empty_strided(
                    shape, layout, device=device, dtype=TORCH_DTYPES[dtype]
                ))
        return outputs

    @property
    def _operator(self) -> str:
        return self.package.rpartition(".")[2]

    @property
    def _library(self) -> str:
        return self.package.rpartition(".")[0]


def unpacked(outputs: Any) -> Any:
    """Return one output as it is, several as a tuple."""
    if isinstance(outputs, Tensor):
        return outputs
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def present(*outputs: Tensor | None) -> Any:
    """Return the outputs that there are: one as it is, several as a tuple."""
    return unpacked([output for output in outputs if output is not None])


def _recorded(
    row: Row | SafeRow, file: KernelFile, call: Call, facts: Mapping[str, int], tensors: int,
    scalars: int,
) -> Recorded:
    from .recording import recorded  # not before a layout comes twice

    return recorded(row, file, call, facts, tensors, scalars)
