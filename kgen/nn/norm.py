"""RMSNorm by `kgen_ops.rmsnorm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor, nn

from ..compat._library import operator_of
from ._extents import check_extents

_OPERATOR = operator_of("rmsnorm")


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dim, with its parameters and its state dict.

    h = x + residual, or x
    y = h / sqrt(mean(h^2) + eps) * (offset + weight)

    Unlike the output of torch's module, y has the dtype of x if the weight is fp32 and x is not.

    Args:
        normalized_shape: Extent of the last dim; a sequence of one number is the same.
        eps: Added to the mean square; None: the machine epsilon of fp32, torch's default for fp32.
        elementwise_affine: Whether there is a weight.
        device, dtype: The device and dtype of the weight.
        offset: Added to the weight, which starts as 1 - offset. Gemma's offset is 1.
    Raises:
        ValueError: If `normalized_shape` has another number of dims than 1.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    offset: float = 0.0

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
    ) -> None:
        if isinstance(normalized_shape, int):
            normalized_shape = (normalized_shape,)
        if isinstance(normalized_shape, str) or not isinstance(normalized_shape, Sequence):
            check_extents("RMSNorm", normalized_shape=normalized_shape)
        shape = tuple(normalized_shape)
        if len(shape) != 1:
            raise ValueError(
                f"RMSNorm: normalized_shape = {shape} has {len(shape)} dims\n"
                "  allowed: the extent of the last dim; flatten the others with x.flatten(-n)"
            )
        check_extents("RMSNorm", normalized_shape=shape[0])
        super().__init__(list(shape), eps, elementwise_affine, device=device, dtype=dtype)
        self.offset = offset
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the factor offset + weight to 1."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute y; with a residual, a named tuple of y and h.

        Args:
            x: [..., N].
            residual: Shape of x, in the dtype of x or in fp32; added to x first.
        """
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        made: Tensor | tuple[Tensor, Tensor] = _OPERATOR(
            x, self.weight, residual, eps=eps, offset=self.offset
        )
        return made

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        offset = f", offset={self.offset:g}" if self.offset else ""
        return f"{super().extra_repr()}{offset}"
