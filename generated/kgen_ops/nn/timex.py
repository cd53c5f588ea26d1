"""TimeX: a causal depthwise convolution by `kgen_ops.timex`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..compat._library import operator_of
from ._extents import check_extents

_OPERATOR = operator_of("timex")


class Timex(nn.Module):
    """Causal depthwise convolution over time, with a filter as long as the longest sequence.

    y[b, c, t] = eps + sum over u <= t of weight[c, L-1-(t-u)] * x[b, c, u]

    With `weight = conv.weight[:, 0]` of `conv = torch.nn.Conv1d(C, C, L, groups=C, padding=L-1,
    bias=False)`, and eps = 0, y is the first T outputs of `conv`.

    Args:
        channels: C.
        length: L, the longest sequence.
        eps: Added to every output.
        device, dtype: The device and dtype of the weight.

    The weight [C, L] starts uniform between -1 / sqrt(L) and 1 / sqrt(L), like that of Conv1d.
    Source: B. Peng, RWKV-CUDA, depthwise_conv1d (`TimeX`), 2022.
    """

    def __init__(
        self,
        channels: int,
        length: int,
        eps: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_extents("Timex", channels=channels, length=length)
        self.channels = channels
        self.length = length
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(channels, length, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from the initial distribution of `torch.nn.Conv1d`."""
        bound = self.length**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Compute y.

        Args:
            x: [B, C, T], T at most L; copied if it is not contiguous. A shorter sequence uses the
                last T columns of the weight, which are copied.
        Raises:
            ValueError: If T is greater than L.
        """
        if not isinstance(x, Tensor) or x.ndim != 3:
            shown = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"Timex: x is {shown}\n  next: pass x [B, C, T]")
        steps = x.shape[-1]
        if steps > self.length:
            raise ValueError(
                f"Timex: x has {steps} time steps, but the filter has {self.length}\n"
                f"  allowed: up to {self.length}; make the module with a greater length"
            )
        weight: Tensor = self.weight
        if steps < self.length:
            weight = weight[:, self.length - steps :].contiguous()
        made: Tensor = _OPERATOR(weight, x.contiguous(), eps=self.eps)
        return made

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        eps = f", eps={self.eps:g}" if self.eps else ""
        return f"channels={self.channels}, length={self.length}{eps}"
