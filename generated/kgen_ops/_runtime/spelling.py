"""The spelling of values in kernels and configs, and the number of bytes of a dtype."""

from __future__ import annotations

from collections.abc import Iterable

from .signature import ABSENT

CUDA_TYPES: dict[str, str] = {
    "fp32": "float",
    "fp16": "kgen::fp16",
    "bf16": "kgen::bf16",
    "tf32": "kgen::tf32",
    "int32": "kgen::i32",
    "int64": "kgen::i64",
    ABSENT: "kgen::none",
}
ITEM_BYTES: dict[str, int] = {
    "fp32": 4, "fp16": 2, "bf16": 2, "tf32": 4, "int32": 4, "int64": 8, ABSENT: 0,
}


def spell(value: float | str) -> str:
    """Spell a parameter's value as in search spaces, templates and CUDA: `true`, not `True`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_dtype_field(name: str) -> bool:
    """Whether a field of a problem is a dtype field; otherwise it is an option."""
    return name.endswith("dtype")


def itemsizes(choices: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Bytes per element of the dtypes among a problem's choices: `itemsize`, `w_itemsize`."""
    return {
        field.replace("dtype", "itemsize"): ITEM_BYTES[name]
        for field, name in choices
        if is_dtype_field(field)
    }


def cuda_spelling(field: str, choice: str) -> str:
    """The spelling of a choice in rendered kernels: a dtype's C++ type, an option unchanged."""
    return CUDA_TYPES[choice] if is_dtype_field(field) else choice
