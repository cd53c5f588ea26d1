"""Prepare the launch of a call: choose its kernel, bind it, and run it for the first time.

`selection.py` gives the order in which kernels are tried. If a kernel does not compile here, or
needs more than the device has, the next one is tried.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .adaptation import named_values, with_values
from .allocation import allocated
from .arguments import BoundArguments, complete_dtypes
from .comparison import SIZES, demand_agreement, made_up_like, results, updated_copies
from .errors import CheckError
from .families import Instance, family_call, instantiated
from .gpus import Table
from .notices import Miss, SafeCalls, note, note_prediction
from .pass_tables import PassTables
from .problems import ALIGNMENT, Explanation, problem_text
from .refusals import is_refusal
from .rows import Call, RecordedPlan, Row, Run, SafeRow, bound_row
from .selection import RowChoice, candidates, explanation
from .signature import PassSignature
from .streams import capturing, on_device, raw_stream, several_devices

if TYPE_CHECKING:
    from .device import KernelFile

# Each kernel that a family or a predicted row gives is compared with the safe kernel at its first
# call, on made-up inputs of the call's layouts. If they differ, the next kernel serves.
# KGEN_CHECK=first compares on the call's own inputs and raises, KGEN_CHECK=0 compares nothing.
CHECK = "KGEN_CHECK"


class Ready(NamedTuple):
    """A bound launch.

    Attributes:
        run: Launches it.
        record: Records its plan.
        step: The dispatch step that chose its kernel.
        config: The config of its kernel.
        safe_calls: Counts its calls if the safe kernel serves it.
    """

    run: Run
    record: Callable[[], RecordedPlan]
    step: str
    config: str
    safe_calls: SafeCalls | None = None


class Preparer:
    """Prepares the launches of one pass."""

    def __init__(self, name: str, signature: PassSignature, tables: PassTables) -> None:
        self._name = name
        self._signature = signature
        self._tables = tables
        # Rows and families that cannot run here -> the reason.
        self._refused: dict[tuple[object, ...], str] = {}
        self._checked: set[tuple[object, ...]] = set()  # kernels of families and predicted rows

    def serve(
        self, bound: BoundArguments, tensors: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None], scalars: Sequence[float],
    ) -> Ready:
        """Serve a call by the first kernel that can, and return its launch for later calls.

        Args:
            bound: The checked arguments.
            tensors: One per input; None for one that is left out.
            outputs: One per output, filled by the call; None for an absent one.
            scalars: One per scalar.
        Raises:
            DispatchError: If the library has no kernel for the call.
            CheckError: If KGEN_CHECK=first is set and a family's result differs from the safe
                kernel's.
            ValueError: If KGEN_CHECK has another value.
        """
        device = _device(tensors)
        call = self._call(bound, tensors)
        table = self._tables.of_device(device)
        for choice in self.candidates(table, bound.dims, bound.dtypes, call):
            try:
                ready = self._bind(choice, bound, call, table.facts, device)
                # In a call that updates tensors, the kernel is compared before it runs: the updates
                # of a kernel that is then refused could not be undone.
                first = bool(self._signature.in_outs)
                if first and choice.is_unproven:
                    self._check(choice, ready, bound, tensors, outputs, scalars)
                _launch(ready, tensors, outputs, scalars)
                if not first and choice.is_unproven:
                    self._check(choice, ready, bound, tensors, outputs, scalars)
            except RuntimeError as trouble:
                raises = isinstance(trouble, CheckError) and _check_mode() == "first"
                if choice.step == "safe" or raises or not is_refusal(trouble):
                    raise
                self._refused[_refusal_key(choice, bound.dims, bound.dtypes)] = (
                    f"{choice.config}: {trouble}")
                continue
            if choice.step == "safe":
                calls = note(self._miss(choice, bound, device))
                return ready._replace(run=calls.counted(ready.run), safe_calls=calls)
            if choice.is_predicted:
                problem, command = self._tune_command(bound, device)
                note_prediction(
                    self._signature.function, problem, str(device), choice.config, command)
            return ready
        raise AssertionError("the last candidate is the safe kernel, or an error")

    def candidates(
        self, table: Table, dims: Mapping[str, int], dtypes: Mapping[str, str], call: Call
    ) -> Iterator[RowChoice]:
        """Yield the kernels that may serve a call, without those that have failed here.

        Raises:
            DispatchError: If the library has no kernel for the call.
        """
        found = candidates(self._signature, self._tables.operator, table, self._tables,
                           tuple(dims.values()), tuple(dtypes.values()), call)
        return (choice for choice in found
                if _refusal_key(choice, dims, dtypes) not in self._refused)

    def explanation(
        self, table: Table, choice: RowChoice, dims: Mapping[str, int],
        dtypes: Mapping[str, str], where: str,
    ) -> Explanation:
        """Describe one of `candidates` and the evidence for it."""
        return explanation(self._signature, table, choice, dims, tuple(dtypes.values()), where)

    def run_given(
        self, row: Row | SafeRow, bound: BoundArguments, tensors: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None], scalars: Sequence[float],
    ) -> None:
        """Run the kernel of a given row; arguments as in `serve`."""
        device = _device(tensors)
        facts = self._tables.of_device(device).facts
        ready = self._bind(RowChoice("given", row), bound, self._call(bound, tensors), facts,
                           device)
        _launch(ready, tensors, outputs, scalars)

    def load(
        self, why: Explanation, dims: Mapping[str, int], dtypes: Mapping[str, str],
        device: torch.device,
    ) -> None:
        """Load the kernel that an explanation names; a family is compiled."""
        if not why.template:
            self._tables.file(why.kernel, device, why.problem)
            return
        family = self._tables.families()[why.config.partition("(")[0]]
        values = named_values(family, why.config)
        assert values is not None  # the explanation's config was made from such values
        self._tables.instance(
            Instance(family, values), dims, complete_dtypes(self._signature, dict(dtypes)), device,
            why.problem)

    def _bind(
        self, choice: RowChoice, bound: BoundArguments, call: Call, facts: Mapping[str, int],
        device: torch.device,
    ) -> Ready:
        """The launch of a kernel for calls like this one, and a function that records its plan."""
        problem = problem_text(
            self._signature, tuple(bound.dims.values()), tuple(bound.dtypes.values())
        )
        if choice.instance is not None:
            stem, file = self._tables.instance(
                choice.instance, bound.dims, bound.dtypes, device, problem)
            row: Row | SafeRow = instantiated(choice.instance, stem, bound.dims, bound.dtypes)
            call = with_values(family_call(call, bound.dtypes.items(), facts),
                               choice.instance.family, choice.instance.values)
        else:
            assert choice.row is not None  # only a family can do without a row
            row = choice.row
            file = self._tables.file(row.kernel, device, problem)
        record = functools.partial(
            _recorded, row, file, call, facts,
            tensors=len(self._signature.inputs) + len(self._signature.outputs),
            scalars=len(self._signature.scalars),
        )
        run = bound_row(row, file, call, facts)
        if device.type == "cuda" and several_devices(device.index):
            run = on_device(run, device.index)
        return Ready(run, record, choice.step, choice.config)

    def _call(self, bound: BoundArguments, tensors: Sequence[Tensor | None]) -> Call:
        pointers = {f"{argument.name}_ptr": 0 if tensor is None else tensor.data_ptr() % ALIGNMENT
                    for argument, tensor in zip(self._signature.inputs, tensors, strict=True)}
        # PyTorch's allocators align the outputs to at least 64 bytes.
        pointers |= {f"{a.name}_ptr": 0 for a in self._signature.outputs}
        return Call(**bound.dims, **bound.strides, **pointers)

    def _miss(self, choice: RowChoice, bound: BoundArguments, device: torch.device) -> Miss:
        """The entry of `misses()` for a call that the safe kernel serves."""
        dims, dtypes = tuple(bound.dims.values()), tuple(bound.dtypes.values())
        problem, command = self._tune_command(bound, device)
        return Miss(
            self._signature.function, problem, str(device), choice.config, 0,
            tuple(why for key, why in self._refused.items() if key[2:] == (dims, dtypes)),
            command,
        )

    def _tune_command(self, bound: BoundArguments, device: torch.device) -> tuple[str, str]:
        """The problem of a call as text, and the command that tunes it on its device."""
        problem = problem_text(
            self._signature, tuple(bound.dims.values()), tuple(bound.dtypes.values()))
        gpu = "host" if device.type == "cpu" else "auto"
        return problem, (f"kgen tune --op {self._tables.operator} --pass {self._name} --gpu {gpu} "
                         f"--problem {problem}")

    def _check(
        self, choice: RowChoice, ready: Ready, bound: BoundArguments,
        tensors: Sequence[Tensor | None], outputs: Sequence[Tensor | None],
        scalars: Sequence[float],
    ) -> None:
        """Compare a kernel that was not verified here with the safe kernel, once for each kernel.

        Raises:
            CheckError: If they differ.
        """
        device, mode = _device(tensors), _check_mode()
        dtypes = tuple(bound.dtypes.values())
        key = (choice.config, dtypes, str(device),
               tuple(bound.dims[name] for name in choice.constants))
        # Nothing can be compared while a CUDA graph is captured.
        if mode == "0" or key in self._checked or (device.type == "cuda" and capturing()):
            return
        safe = next((row for row in self._tables.safe_rows() if row.dtypes == dtypes), None)
        if safe is None:
            return
        problem = problem_text(self._signature, tuple(bound.dims.values()), dtypes)
        what = f"{problem}: the first result of {choice.config}"
        try:
            for size in SIZES if mode != "first" else (None,):
                found = list(outputs)
                if size is not None:
                    tensors = made_up_like(self._signature, tensors, size)
                own = updated_copies(self._signature, tensors)
                if size is not None or self._signature.in_outs:
                    found = allocated(self._signature, bound, device)
                    _launch(ready, own, found, scalars)
                found = results(self._signature, own, found)
                own = updated_copies(self._signature, tensors)
                wanted = allocated(self._signature, bound, device)
                if not self._ran(safe, bound, own, wanted, scalars):
                    return
                wanted = results(self._signature, own, wanted)
                if demand_agreement(found, wanted, dtypes, what):
                    self._checked.add(key)
                    return
        except torch.OutOfMemoryError:
            return  # memory suffices only for the call itself; a smaller call will be compared

    def _ran(
        self, safe: SafeRow, bound: BoundArguments, tensors: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None], scalars: Sequence[float],
    ) -> bool:
        """Run the safe kernel; return whether it can run here."""
        try:
            self.run_given(safe, bound, tensors, outputs, scalars)
        except RuntimeError as trouble:
            if not is_refusal(trouble):
                raise
            return False
        return True


def _check_mode() -> str:
    mode = os.environ.get(CHECK, "")
    if mode not in ("", "first", "0"):
        raise ValueError(f"{CHECK}={mode}: allowed are 'first', which raises if a family's first "
                         "result differs from the safe kernel's, and '0', which compares nothing")
    return mode


def _device(tensors: Sequence[Tensor | None]) -> torch.device:
    first = tensors[0]
    assert first is not None  # `bind_arguments` refuses None here
    return first.device


def _launch(
    ready: Ready, tensors: Sequence[Tensor | None], outputs: Sequence[Tensor | None],
    scalars: Sequence[float],
) -> None:
    first = tensors[0]
    assert first is not None
    pointers = (0 if t is None else t.data_ptr() for t in (*tensors, *outputs))
    ready.run(raw_stream(first.get_device()), *pointers, *scalars)


def _refusal_key(
    choice: RowChoice, dims: Mapping[str, int], dtypes: Mapping[str, str]
) -> tuple[object, ...]:
    """The key of a failed kernel, which is not tried again: its config and the problem."""
    return (choice.step == "family", choice.config, tuple(dims.values()), tuple(dtypes.values()))


def _recorded(
    row: Row | SafeRow, file: KernelFile, call: Call, facts: Mapping[str, int], tensors: int,
    scalars: int,
) -> RecordedPlan:
    from .recording import recorded  # imported only when a fast path is made

    return recorded(row, file, call, facts, tensors, scalars)
