"""Load kernels in advance: before a CUDA graph capture, or before a server's first request."""

from __future__ import annotations

import torch

from .explain import parsed, placed
from .problems import Explanation


def warmup(
    operator: str,
    *,
    device: str | torch.device | None = None,
    pass_name: str = "forward",
    **problem: int | str | torch.dtype,
) -> Explanation:
    """Load the kernel that serves a contiguous, aligned call, compiling it if no cubin is shipped.

        kgen_ops.warmup("rmsnorm", M=8192, N=4096, dtype="bf16")

    Another kernel may serve a call with other strides or with pointers that are not aligned to
    32 bytes. Make such a call once instead.

    Args:
        operator: Name of an operator of the library.
        device: Default: the current CUDA device, else the CPU.
        pass_name: `forward` or `backward`.
        problem: Every dim, and dtypes by name or as torch dtypes.
    Returns:
        The kernel and the evidence for it; see `explain`.
    Raises:
        ValueError: If operator, pass or a dim is unknown, or a dim is missing.
        TypeError: If a dtype is missing or not supported.
        DispatchError: If the library has no kernel for the device, or a CUDA graph is being
            captured.
    """
    chosen, dims, dtypes = parsed(operator, pass_name, problem)
    return chosen.warm(dims, dtypes, placed(device))
