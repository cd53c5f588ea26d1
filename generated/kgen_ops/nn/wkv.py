"""Time mixing of RWKV-4, RWKV-5 and RWKV-6, with the parameters of the recurrence.

Initial values are those of RWKV-LM (github.com/BlinkDL/RWKV-LM), the authors' training code. They
depend on the layer's position in the model: depth is 0 for the first layer and 1 for the last
layer. The layer of a model with one layer, for which RWKV-LM divides by zero, has depth 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..compat._library import operator_of
from ..compat._wkv import heads
from ._extents import check_extents, refuse_rows

_WKV4, _WKV5, _WKV6 = map(operator_of, ("wkv4", "wkv5", "wkv6"))


class Wkv4(nn.Module):
    """RWKV-4: a mean weighted by exponentials, with a decay per channel.

    y_t = (N_{t-1} + exp(u + k_t) v_t) / (D_{t-1} + exp(u + k_t))
    N_t = d N_{t-1} + exp(k_t) v_t,  D_t = d D_{t-1} + exp(k_t);  d = exp(-exp(time_decay))

    u is `time_first`. Both parameters are [C], and named as in RWKV-LM and transformers.

    Args:
        channels: C.
        layer, layers: Place of the layer in the model, from 0, and number of layers. They choose
            the initial values alone.
        device, dtype: The device and dtype of the parameters; fp32 serves inputs of any dtype.

    Initial values: time_decay[c] = -5 + 8 (c / (C-1))^(0.7 + 1.3 depth);
    time_first[c] = log(0.3) + 0.5 ((c+1) mod 3 - 1).
    Source: Peng et al. 2023, arXiv:2305.13048; initial values: `RWKV_TimeMix` of RWKV-LM's
    RWKV-v4/src/model.py.
    """

    def __init__(
        self,
        channels: int,
        layer: int = 0,
        layers: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_extents("Wkv4", channels=channels)
        self.channels = channels
        self.depth = depth_of("Wkv4", layer, layers)
        self.time_decay = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.time_first = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values."""
        with torch.no_grad():
            decay = -5 + 8 * ramp(self.channels) ** (0.7 + 1.3 * self.depth)
            self.time_decay.copy_(decay)
            self.time_first.copy_(0.5 * zigzag(self.channels) + torch.tensor(0.3).log())

    def forward(
        self, k: Tensor, v: Tensor, state: Tensor | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute y [B, T, C], and the state after the last step if `return_state` is set.

        Args:
            k, v: [B, T, C].
            state: [B, C, 3] in fp32, returned by an earlier call; None: the sequence begins.
            return_state: Whether to return the state as well.
        """
        made: Tensor | tuple[Tensor, Tensor] = _WKV4(
            k, v, self.time_decay, self.time_first, state, return_final_state=return_state,
            decay_form="raw",
        )
        return made

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"channels={self.channels}"


class _Heads(nn.Module):
    """Heads with a matrix state, and a bonus u [H, K] for the current step."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        layer: int = 0,
        layers: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_extents(type(self).__name__, num_heads=num_heads, head_size=head_size)
        self.num_heads = num_heads
        self.head_size = head_size
        self.depth = depth_of(type(self).__name__, layer, layers)
        self.time_faaaa = nn.Parameter(
            torch.empty(num_heads, head_size, device=device, dtype=dtype)
        )

    def reset_parameters(self) -> None:
        """Set the initial values."""
        count = self.num_heads * self.head_size
        bonus = self.depth * (1 - ramp(count)) + 0.1 * zigzag(count)
        with torch.no_grad():
            self.time_faaaa.copy_(heads(bonus, self.num_heads))

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"num_heads={self.num_heads}, head_size={self.head_size}"

    def _split(self, *tensors: Tensor) -> list[Tensor]:
        try:
            return [heads(x, self.num_heads) for x in tensors]
        except (AttributeError, IndexError, RuntimeError, TypeError) as problem:
            named = dict(zip("rkvw", tensors, strict=False))
            refuse_rows(type(self).__name__, self.num_heads, named, problem)


class Wkv5(_Heads):
    """RWKV-5: a matrix state for each head, with a decay per feature.

    y_t = r_t (S_{t-1} + diag(u) k_t v_t^T)
    S_t = diag(d) S_{t-1} + k_t v_t^T;  d = exp(-exp(time_decay))

    u is `time_faaaa`. Both parameters are [H, K], and named as in RWKV-LM.

    Args:
        num_heads: H.
        head_size: K, the features of a head of r and k; a head of v may have a different number, V.
        layer, layers: Place of the layer in the model, from 0, and number of layers. They choose
            the initial values alone.
        device, dtype: The device and dtype of the parameters; fp32 serves inputs of any dtype.

    Initial values, with c = h K + i and C = H K: time_decay = -6 + 5 (c / (C-1))^(0.7 + 1.3 depth);
    time_faaaa = depth (1 - c / (C-1)) + 0.1 ((c+1) mod 3 - 1).
    Source: Peng et al. 2024, arXiv:2404.05892; initial values: `RWKV_Tmix_x052` of RWKV-LM's
    RWKV-v5/src/model.py.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        layer: int = 0,
        layers: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, head_size, layer, layers, device, dtype)
        self.time_decay = nn.Parameter(torch.empty_like(self.time_faaaa))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values."""
        super().reset_parameters()
        decay = -6 + 5 * ramp(self.num_heads * self.head_size) ** (0.7 + 1.3 * self.depth)
        with torch.no_grad():
            self.time_decay.copy_(heads(decay, self.num_heads))

    def forward(
        self,
        r: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor | None = None,
        return_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute y [B, T, H V], and the state after the last step if `return_state` is set.

        Args:
            r, k: [B, T, H K].
            v: [B, T, H V].
            state: [B, H, K, V] in fp32, returned by an earlier call; None: the sequence begins.
            return_state: Whether to return the state as well.
            cu_seqlens: [N + 1]; bounds of sequences packed into T. B is then 1, and states are
                [N, H, K, V].
        """
        made = _WKV5(
            *self._split(r, k, v), self.time_decay, self.time_faaaa, state, cu_seqlens,
            return_final_state=return_state, decay_form="raw",
        )
        return (made[0].flatten(2), made[1]) if return_state else made.flatten(2)


class Wkv6(_Heads):
    """RWKV-6: a matrix state for each head, with a decay per step and feature.

    y_t = r_t (S_{t-1} + diag(u) k_t v_t^T)
    S_t = diag(d_t) S_{t-1} + k_t v_t^T;  d_t = exp(-exp(w_t))

    The one parameter is u [H, K], `time_faaaa` in RWKV-LM. The decay w comes from the model, which
    computes it from the input.

    Args:
        num_heads: H.
        head_size: K, the features of a head of r, k and w; a head of v may have a different number,
            V.
        layer, layers: Place of the layer in the model, from 0, and number of layers. They choose
            the initial values alone.
        device, dtype: The device and dtype of the parameter; fp32 serves inputs of any dtype.

    Initial values: those of `Wkv5.time_faaaa`. The part of w that does not depend on the input
    starts in RWKV-LM as `Wkv5.time_decay` does.
    Source: Peng et al. 2024, arXiv:2404.05892; initial values: `RWKV_Tmix_x060` of RWKV-LM's
    RWKV-v5/src/model.py.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        layer: int = 0,
        layers: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, head_size, layer, layers, device, dtype)
        self.reset_parameters()

    def forward(
        self,
        r: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        state: Tensor | None = None,
        return_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute y [B, T, H V], and the state after the last step if `return_state` is set.

        Args:
            r, k: [B, T, H K].
            v: [B, T, H V].
            w: [B, T, H K], in the form that RWKV models learn: the decay is exp(-exp(w)).
            state, return_state, cu_seqlens: As for `Wkv5`.
        """
        made = _WKV6(
            *self._split(r, k, v, w), self.time_faaaa, state, cu_seqlens,
            return_final_state=return_state, decay_form="raw",
        )
        return (made[0].flatten(2), made[1]) if return_state else made.flatten(2)


def depth_of(kind: str, layer: int, layers: int) -> float:
    """Depth of a layer, from 0 for the first layer to 1 for the last.

    Raises:
        ValueError: If there is no such layer.
    """
    numbers = isinstance(layer, int) and isinstance(layers, int)
    if not numbers or not 0 <= layer < layers:
        raise ValueError(f"{kind}: layer = {layer!r} of layers = {layers!r}\n"
                         "  allowed: 0 <= layer < layers")
    return layer / max(layers - 1, 1)


def ramp(count: int) -> Tensor:
    """From 0 to 1 over the channels."""
    return torch.linspace(0, 1, count)


def zigzag(count: int) -> Tensor:
    """0, 1, -1 in turn over the channels."""
    return (torch.arange(count) + 1) % 3 - 1.0
