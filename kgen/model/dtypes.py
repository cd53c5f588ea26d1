"""The scalar types that problems name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """A scalar type.

    Attributes:
        name: As written in problems: `bf16`.
        itemsize: Bytes per element.
        cuda: C++ type in rendered kernels.
        torch: Attribute of the torch module: `bfloat16`.
        mantissa_bits: Stored fraction bits; one ulp at 1.0 is 2**-mantissa_bits.
        rounds: Name of the dtype whose values these are when rounded; empty for a dtype that
            tensors are stored in. A field that no tensor has may choose such a dtype, to say how
            the operands of matrix products may be rounded.
        integral: Whether it has whole numbers: of tensors that say where others' parts lie.
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


DTYPES: dict[str, DType] = {
    t.name: t
    for t in (
        DType("fp32", 4, "float", "float32", 23),
        DType("fp16", 2, "kgen::fp16", "float16", 10),
        DType("bf16", 2, "kgen::bf16", "bfloat16", 7),
        DType("tf32", 4, "kgen::tf32", "float32", 10, rounds="fp32"),
        DType("int32", 4, "kgen::i32", "int32", 0, integral=True),
        DType("int64", 8, "kgen::i64", "int64", 0, integral=True),
    )
}

# What a dtype field may choose besides: the tensors of that field are then absent. Not among
# DTYPES, because nothing can be stored in it.
ABSENT = DType("none", 0, "kgen::none", "", 0)


def dtype_named(name: str) -> DType:
    """Look up a dtype, or `none`."""
    return ABSENT if name == ABSENT.name else DTYPES[name]


def is_dtype_field(name: str) -> bool:
    """Whether a choice of a problem is a dtype; else it is an option."""
    return name.endswith("dtype")


def itemsizes(choices: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Bytes per element of the dtypes among a problem's choices: `itemsize`, `w_itemsize`."""
    return {
        field.replace("dtype", "itemsize"): dtype_named(name).itemsize
        for field, name in choices
        if is_dtype_field(field)
    }


def spelled(field: str, choice: str) -> str:
    """A choice as rendered kernels spell it: a dtype's C++ type, an option as it is."""
    return dtype_named(choice).cuda if is_dtype_field(field) else choice
