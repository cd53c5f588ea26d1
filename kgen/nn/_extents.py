"""Check the extents that modules are constructed with; explain tensors that do not fit them."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor


def check_extents(module: str, **extents: object) -> None:
    """Check that extents are whole numbers of at least 1.

    Args:
        module: Class of the module, for the error.
        extents: Name of the argument -> its value.
    Raises:
        TypeError: If an extent is no whole number.
        ValueError: If an extent is less than 1 or has more than 63 bits.
    """
    for name, value in extents.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{module}: {name} = {value!r} is no whole number\n"
                            "  next: pass an int of at least 1")
        if not 1 <= value < 1 << 63:
            raise ValueError(f"{module}: {name} = {value} is no extent\n"
                             "  next: pass an int of at least 1")


def refuse_rows(
    module: str, count: int, tensors: dict[str, Tensor], problem: Exception
) -> NoReturn:
    """Raise the error of tensors that are not rows of heads, [B, T, H * features].

    Args:
        module: Class of the module, for the error.
        count: H.
        tensors: Name of the argument -> its value.
        problem: The exception that PyTorch raised.
    Raises:
        TypeError: If an argument is no tensor.
        ValueError: If a tensor cannot be viewed as heads.
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{module}: {name} must be a tensor, not {type(x).__name__}\n"
                            f"  next: pass {name} [B, T, C]") from problem
        if x.ndim != 3 or x.shape[-1] % count:
            raise ValueError(f"{module}: {name} has shape {tuple(x.shape)}\n  next: pass {name} "
                             f"[B, T, C]; C must be a multiple of num_heads = {count}"
                             ) from problem
    shapes = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in tensors.items())
    raise ValueError(f"{module}: the tensors do not fit the module or each other: {shapes}\n"
                     f"  next: compare them with help({module}.forward)") from problem
