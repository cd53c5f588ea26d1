"""Dispatch: check a call's arguments, allocate its outputs, choose its kernel and launch it.

A dispatcher keeps one prepared launch per combination of shapes, strides, dtypes, device and
pointer alignment. The generated function of an operator looks the launch up and calls it. If there
is none, the generated function calls `Dispatcher.call`, which has one prepared (`preparing.py`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .allocation import allocated, allocator
from .argument_kinds import WRONG_KIND, check_kinds, check_memory, check_tensors, refuse_traces
from .arguments import (
    bind_arguments,
    complete_dtypes,
    has_offsets_on_cpu,
    has_own_values,
)
from .autocast import any_autocast, promoted
from .batching import Outputs
from .errors import DispatchError
from .fast_path import FastPath, make_fast_path
from .gpus import gpu_of
from .gradients import Gradient, refuse_grad
from .pass_tables import PassTables
from .problems import ALIGNMENT, Explanation, contiguous_call
from .rows import Gpu, PreparedLaunch, Row, SafeRow
from .signature import PassSignature
from .streams import current_device, several_devices, stream_getter

if TYPE_CHECKING:
    from .arguments import BoundArguments
    from .preparing import Preparer, Ready

    # The pass, the checked arguments, the device and what served a call -> the launch of later
    # calls.
    Observer = Callable[["Dispatcher", BoundArguments, torch.device, Ready], Callable[..., None]]

__all__ = [
    "DISPATCHERS", "PLAIN_OR_NONE", "PLAIN_TENSORS", "WRONG_KIND", "DispatchError", "Dispatcher",
    "dispatch_modes", "only", "present", "transforms", "written",
]

# Bounds the memory of a server that sees many sequence lengths. At the limit all prepared launches
# are dropped; preparing one again takes microseconds.
MAX_PREPARED = 8192
# Fast paths per set of given tensors. A call tries each, at 0.1 us, before it looks up `prepared`.
# If none of them serves a call, every REPLACED_EVERY-th such call replaces the oldest.
MAX_FAST_PATHS = 4
REPLACED_EVERY = 64

# Tensor types that are served directly. All others (fake, functional, a user's subclass) go
# through PyTorch's dispatcher.
PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})
PLAIN_OR_NONE = PLAIN_TENSORS | {type(None)}

# If a mode or transform is active, a call goes through PyTorch's dispatcher. These C functions take
# 20 ns each.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack

_increment_version: Callable[[Sequence[Tensor]], None] = torch._C._increment_version

# Whether each optional output is absent -> constructor of the result from the present outputs: a
# named tuple, or `only`.
Results = Mapping[tuple[bool, ...], Callable[..., Any]]


_filled: Callable[..., Any] = tuple.__new__


def only(output: Tensor) -> Tensor:
    """The result of a call with one output."""
    return output


def present(result: Callable[..., Any], *outputs: Tensor | None) -> Any:
    """Make a result from the outputs that are not None."""
    there = [output for output in outputs if output is not None]
    # Half the time of the named tuple's own constructor, which is a function in Python.
    return there[0] if len(there) == 1 else _filled(result, there)


# All dispatchers of the library, in the order in which its operators were imported.
DISPATCHERS: list[Dispatcher] = []


class Dispatcher:
    """Dispatches the calls of one pass of an operator.

    Attributes:
        name: `forward` or `backward`.
        signature: Arguments and results of the pass.
        differentiable: For a forward pass: whether kgen has a backward pass of the operator.
        results: The type in which the outputs of a call are returned.
        tables: The dispatch tables and loaded kernels of the pass.
        prepared: Lookup key of the generated function -> the prepared launch.
        fast_paths: (which tensors are given, flags) -> the fast paths of such calls; see
            `fast_path.py`.
        run: The implementation of the generated function, after its checks; set at registration.
        gradient: For a forward pass: the connection to the backward pass for autograd. None if the
            library does not have the backward pass.
        observer: Records every call during a capture (`capture.py`), else None. During a capture no
            call takes a fast path.
    """

    run: Callable[..., Any]
    gradient: Gradient | None = None
    observer: Observer | None = None

    def __init__(
        self, package: str, name: str, signature: PassSignature, differentiable: bool = True,
        results: Results = MappingProxyType({(): only}),
    ) -> None:
        self.name = name
        self.results = results
        self.differentiable = differentiable
        self.signature = signature
        self.tables = PassTables(package, name, signature.function)
        self.prepared: dict[Any, PreparedLaunch] = {}
        self.fast_paths: dict[Any, tuple[FastPath, ...]] = {}
        self._uncovered = 0
        self._has_no_fast_path = False
        self._lock = threading.RLock()
        DISPATCHERS.append(self)

    @functools.cached_property
    def _preparer(self) -> Preparer:
        # Only a first call needs it; importing the library stays light without.
        from .preparing import Preparer

        return Preparer(self.name, self.signature, self.tables)

    @functools.cached_property
    def _outputs(self) -> Outputs:
        return Outputs(self.signature)

    def _result_of(self, outputs: Sequence[object | None]) -> Callable[..., Any]:
        """The function that builds the result of a call; None stands for each absent output."""
        return self.results[tuple(outputs[index] is None for index in self._outputs.optional)]

    def call(
        self, key: object, tensors: Sequence[Tensor | None], scalars: Sequence[float],
        flags: Sequence[bool | str] = (),
    ) -> Any:
        """Serve a call that has no prepared launch yet, and keep the launch that it prepares.

        Args:
            key: The lookup key of the call.
            tensors: One per input; None for one that is left out.
            scalars: One per scalar.
            flags: The choice of each of the signature's `flags`, then of each option.
        Returns:
            The outputs that are present: one tensor, or a tuple.
        Raises:
            TypeError, ValueError: If the arguments do not match the signature.
            DispatchError: If the library has no kernel for the device.
        """
        refuse_traces(self.signature)
        if isinstance(tensors[0], Tensor) and tensors[0].device.type == "meta":
            if not any_autocast():  # autocast would cast the tensors first
                bind_arguments(self.signature, tensors, scalars, flags)
            return self.dispatched(tensors, scalars, flags)
        if not all(tensor is None or has_own_values(tensor) for tensor in tensors):
            self._refuse_to_copy(tensors)
            copies = (
                tensor if tensor is None or argument.in_out else tensor.clone()
                for argument, tensor in zip(self.signature.inputs, tensors, strict=True)
            )
            return self.run(*copies, *scalars, *flags)
        if any_autocast():
            cast = promoted(self.signature, tensors)
            if any(new is not old for new, old in zip(cast, tensors, strict=True)):
                return self.run(*cast, *scalars, *flags)
        bound = bind_arguments(self.signature, tensors, scalars, flags)
        check_memory(self.signature, tensors)
        if has_offsets_on_cpu(self.signature, tensors):
            key = None  # the next call may have other values, which must be checked as well
        first = tensors[0]
        assert first is not None  # bind_arguments refuses None here
        device = first.device
        outputs = allocated(self.signature, bound, device)
        found = present(self._result_of(outputs), *outputs)
        updated = [tensors[index] for index in self.signature.in_outs]
        if all(made is None or made.numel() == 0 for made in (*outputs, *updated)):
            return found
        if bound.copies:
            tensors = [
                tensor.contiguous() if tensor is not None and argument.name in bound.copies
                else tensor
                for argument, tensor in zip(self.signature.inputs, tensors, strict=True)
            ]
            bound = bind_arguments(self.signature, tensors, scalars, flags)
            key = None
        with self._lock:
            prepared = self._preparer.serve(bound, tensors, outputs, scalars)
        run = prepared.run
        if (observer := self.observer) is not None:
            run = observer(self, bound, device, prepared)
        if key is not None:
            if len(self.prepared) >= MAX_PREPARED:
                self.forget()
            index = first.get_device()
            self.prepared[key] = PreparedLaunch(run, stream_getter(index), index, tuple(
                None if made is None
                else allocator(tuple(made.shape), made.stride(), made.dtype, device)
                for made in outputs
            ), prepared.record, prepared.safe_calls)
        written(*updated)
        return found

    def _refuse_to_copy(self, tensors: Sequence[Tensor | None]) -> None:
        """Raise an error if the call would update a copy of a tensor."""
        for index in self.signature.in_outs:
            tensor = tensors[index]
            if tensor is not None and not has_own_values(tensor):
                raise ValueError(
                    f"{self.signature.function}: {self.signature.inputs[index].name} is a view "
                    "whose memory does not hold its values (a negated imaginary part, or zeros "
                    "without memory), and the call writes into it\n  pass a tensor of its own"
                )

    def add_fast_path(
        self, given: object, prepared: PreparedLaunch, *tensors: Tensor | None
    ) -> None:
        """Add a fast path for calls whose tensors have the layouts of these tensors.

        Args:
            given: Which tensors are given, and the flags.
            prepared: The prepared launch of the call.
            tensors: One per input; None for one that is left out.
        """
        if self._has_no_fast_path or self.observer is not None:
            return
        fast_paths = self.fast_paths.get(given, ())
        if len(fast_paths) == MAX_FAST_PATHS:
            # The caller alternates between many layouts. Making a fast path costs more than it
            # saves in one call, so a new one rarely replaces the oldest.
            self._uncovered += 1
            if self._uncovered % REPLACED_EVERY:
                return
            fast_paths = fast_paths[1:]
        there = [tensor for tensor in tensors if tensor is not None]
        if any(tensor.data_ptr() % ALIGNMENT for tensor in there):
            return  # a fast path serves only aligned tensors
        if len({id(tensor) for tensor in there}) < len(there):
            return  # PyTorch's tensor check refuses calls that pass one tensor twice
        if several_devices(prepared.device) and current_device() != prepared.device:
            return  # a fast path serves only calls on the current device
        result = self._result_of(prepared.outputs)
        if (new := make_fast_path(tensors, prepared, ALIGNMENT, result)) is None:
            self._has_no_fast_path = True
        else:
            self.fast_paths[given] = (*fast_paths, new)
            if prepared.safe_calls is not None:
                prepared.safe_calls.fast_paths.append(new)

    def forget(self) -> None:
        """Drop all prepared launches; the next calls prepare them again."""
        self.fast_paths.clear()
        self._has_no_fast_path = False
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
        arguments = (*tensors, *scalars, *flags)
        if self.gradient is not None and transforms() and torch.is_grad_enabled():
            # torch.func computes gradients only above the dispatcher.
            made = self.gradient.transformed.apply(operator, *arguments)
        else:
            made = operator(*arguments)
        there = self._outputs.present(arguments)
        absent = tuple(index not in there for index in self._outputs.optional)
        return self.results[absent](*((made,) if isinstance(made, Tensor) else made))

    def name_wrong_argument(
        self, error: Exception, tensors: Sequence[object], scalars: Sequence[object],
        flags: Sequence[object] = (),
    ) -> None:
        """If an argument of a wrong kind made a call raise `error`, raise an error that names it.

        These checks only run after an error, so that other calls do not pay for them.
        """
        check_kinds(error, self.signature, tensors, scalars, flags)

    def recorded(self, run: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """Serve a call that needs a gradient, and record it for autograd.

        Args:
            run: Computes the outputs from the arguments.
            arguments: All arguments of the call, in the order of the generated function.
        Returns:
            The outputs that are present.
        Raises:
            NotImplementedError: If the library has no backward pass for this one.
        """
        if self.gradient is None:
            if self.signature.in_outs:
                names = [self.signature.inputs[index].name for index in self.signature.in_outs]
                why = f"the call updates {' and '.join(names)} in place, which has no gradient"
            elif self.name != "forward":
                why = "the library has no second derivatives: operators are differentiable once"
            elif not self.differentiable:
                why = f"{self.tables.operator} has no backward pass: write it in plain PyTorch"
            else:
                operator = self.tables.operator
                why = (f"the library has no {operator}_backward\n"
                       f"  run: kgen tune --op {operator} --pass backward --gpu auto")
            refuse_grad(self.signature, arguments, why)
        count = len(self.signature.inputs)
        if any_autocast():  # autograd must record the casts
            arguments = (*promoted(self.signature, arguments[:count]), *arguments[count:])
        made: tuple[Tensor, ...] = self.gradient.function.apply(run, *arguments)
        return made

    def explain(self, dims: Mapping[str, int], dtypes: Mapping[str, str],
                device: torch.device | Gpu) -> Explanation:
        """Say which kernel serves a contiguous, aligned call of these dims and dtypes.

        Args:
            dims: Every dim, by name.
            dtypes: The choice of each dtype field and option.
            device: Where the call would run; a `Gpu` need not be in this machine.
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
            table = self.tables.of_gpu(
                *gpu_of(signature.function, self.tables.operator, self.tables.gpus(), device)
            )
        else:
            table = self.tables.of_device(device)
        choice = next(self._preparer.candidates(table, extents, chosen, call))
        where = device.name if isinstance(device, Gpu) else str(device)
        return self._preparer.explanation(table, choice, extents, chosen, where)

    def warm(self, dims: Mapping[str, int], dtypes: Mapping[str, str],
             device: torch.device) -> Explanation:
        """Load the kernel that `explain` names.

        Raises:
            TypeError, ValueError, DispatchError: As in `explain`.
        """
        why = self.explain(dims, dtypes, device)
        with self._lock:
            self._preparer.load(why, dims, dtypes, device)
        return why

    def run_row(
        self, row: Row | SafeRow, tensors: Sequence[Tensor | None], scalars: Sequence[float],
        flags: Sequence[bool | str] = (),
    ) -> list[Tensor | None]:
        """Run the kernel of a given row instead of the row that dispatch would choose; see `call`.

        Returns:
            One tensor per output; None for an absent one.
        """
        bound = bind_arguments(self.signature, tensors, scalars, flags)
        first = tensors[0]
        assert first is not None  # bind_arguments refuses None here
        outputs = allocated(self.signature, bound, first.device)
        self._preparer.run_given(row, bound, tensors, outputs, scalars)
        return outputs


def written(*tensors: Tensor | None) -> None:
    """Tell autograd that a call has written into tensors, as PyTorch's in-place operators do."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_inference():
            _increment_version((tensor,))
