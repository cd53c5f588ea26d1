"""Products by warpgroups for the kernels in `tests/unit/host_kernels/wgmma.cu`, and their results.

All values are small integers, so every product and sum is exact in every type.
"""

from __future__ import annotations

import torch
from torch import Tensor

THREADS = 256  # two warpgroups
BYTES = 96 * 1024  # of dynamic shared memory: more than any kernel here needs
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Type, N, and the major dimension of A and of B. In `bf16_16_*_MN` and `bf16_32_*_MN` the second
# group's B begins inside a panel. A K-major operand advances by 16 columns, also to the next panel.
PRODUCTS = (
    "bf16_16_K_K", "bf16_16_K_MN",
    "bf16_32_K_K", "bf16_32_K_MN", "bf16_32_MN_MN",
    "bf16_64_K_K", "bf16_64_K_MN", "bf16_64_MN_K", "bf16_64_MN_MN",
    "bf16_128_K_K", "bf16_128_K_MN", "bf16_128_MN_MN",
    "fp16_64_K_MN", "fp16_128_MN_MN",
)  # fmt: skip
INSIDE = "begins_inside"  # both: operands begin at column 32 of a panel and advance by 16 columns


def integers(*shape: int, seed: int) -> Tensor:
    """Draw whole numbers from -8 to 8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float()


def operands(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A and B in the layout that the kernel of `PRODUCTS` expects, C, and the expected result."""
    dtype, n, major_a, major_b = name.split("_")
    a, b = integers(64, 128, seed=1), integers(128, 2 * int(n), seed=2)
    c = integers(64, 2 * int(n), seed=3)
    kind = HALVES[dtype]
    return (
        (a if major_a == "K" else a.T).contiguous().to(kind),
        (b if major_b == "MN" else b.T).contiguous().to(kind),
        c,
        c + 2 * (a @ b),
    )


def operands_inside() -> tuple[Tensor, Tensor, Tensor]:
    """A and B in the layout that the kernel `INSIDE` expects, and the expected result."""
    a, b = integers(64, 64, seed=6), integers(64, 64, seed=7)
    return a.bfloat16(), b.bfloat16(), a[:, 32:] @ b[:, 32:].T
