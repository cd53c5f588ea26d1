"""The scalar types that problems name."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.runtime.signature import ABSENT
from kgen.runtime.spelling import CUDA_TYPES, ITEM_BYTES


@dataclass(frozen=True, slots=True)
class DType:
    """A scalar type.

    Attributes:
        name: As written in problems: `bf16`.
        itemsize: Bytes per element.
        cuda: C++ type in rendered kernels.
        torch: Attribute of the torch module: `bfloat16`.
        mantissa_bits: Stored fraction bits; one ulp at 1.0 is 2**-mantissa_bits.
        rounds: For a dtype that no tensor is stored in (`tf32`): the dtype whose values are rounded
            to it (`fp32`); empty for all others. A dtype field without tensors may choose such a
            dtype, which says how the operands of matrix products may be rounded.
        integral: Whether the dtype is an integer type, for tensors of offsets.
    """

    name: str
    itemsize: int
    cuda: str
    torch: str
    mantissa_bits: int
    rounds: str = ""
    integral: bool = False

    @property
    def eps(self) -> float:
        """Distance from 1.0 to the next representable number."""
        return float(2.0**-self.mantissa_bits)


def _dtype(
    name: str, torch: str, mantissa_bits: int, rounds: str = "", *, integral: bool = False
) -> DType:
    return DType(
        name, ITEM_BYTES[name], CUDA_TYPES[name], torch, mantissa_bits, rounds, integral
    )


DTYPES: dict[str, DType] = {
    t.name: t
    for t in (
        _dtype("fp32", "float32", 23),
        _dtype("fp16", "float16", 10),
        _dtype("bf16", "bfloat16", 7),
        _dtype("tf32", "float32", 10, rounds="fp32"),
        _dtype("int32", "int32", 0, integral=True),
        _dtype("int64", "int64", 0, integral=True),
    )
}

# The choice of a dtype field whose tensors are absent. DTYPES lacks it because no tensor has it.
ABSENT_DTYPE = _dtype(ABSENT, "", 0)


def dtype_named(name: str) -> DType:
    """Look up a dtype, or `none`."""
    return ABSENT_DTYPE if name == ABSENT else DTYPES[name]
