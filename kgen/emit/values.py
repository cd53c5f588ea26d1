"""The values that a tune passes to emission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.model.artifact import Rendered
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.record import Record
from kgen.model.space import Variant
from kgen.operators.base import Operator


@dataclass(frozen=True)
class Winner:
    """The config chosen for one problem on one GPU.

    Attributes:
        operator: The operator.
        pass_name: `forward` or `backward`.
        problem: The tuned problem.
        gpu: The GPU on which it was measured.
        variant: The variant of the config.
        config: The winner.
        rendered: The config's source.
        cubin: The built module for `arch`; None for the host, where the library compiles the
            source itself.
        arch: `sm_90a`, or `host`.
        record: The verified trial; its timing goes into the table.
        searched: Whether a search chose it; otherwise it was measured while a rule was learnt.
        predicted: Whether a model chose it and estimated the record's timing. The kernel was
            verified only on the CPU.
    """

    operator: Operator
    pass_name: str
    problem: Problem
    gpu: GpuProfile
    variant: Variant
    config: Config
    rendered: Rendered
    cubin: bytes | None
    arch: str
    record: Record
    searched: bool = True
    predicted: bool = False


@dataclass(frozen=True)
class SafeKernel:
    """The safe variant of a pass, rendered for one combination of dtypes.

    Attributes:
        operator: The operator.
        pass_name: `forward` or `backward`.
        dtypes: Dtype name of every dtype field.
        variant: The pass's safe variant.
        config: The variant's `safe` config.
        rendered: The kernel's source.
        code: Digest of its machine code, by the architectures on which it was certified.
    """

    operator: Operator
    pass_name: str
    dtypes: Mapping[str, str]
    variant: Variant
    config: Config
    rendered: Rendered
    code: tuple[tuple[str, str], ...] = ()
