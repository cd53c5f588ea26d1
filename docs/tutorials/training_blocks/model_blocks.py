"""A transformer block with RMSNorm and an RWKV-6 block, whose operators are given from outside.

Each block is written once. Which functions it calls, eager PyTorch's or kgen_ops', is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn


@dataclass(frozen=True)
class Operators:
    """The functions that the blocks call.

    Attributes:
        rmsnorm: (x, w, residual or None) -> y, or with a residual y and x + residual.
        wkv6: (r, k, v, w, u) -> y; w is the log decay.
    """

    rmsnorm: Callable[..., Any]
    wkv6: Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and of its batches.

    Attributes:
        batch: Sequences in a batch.
        steps: Tokens in a sequence.
        channels: Features of a token; a multiple of heads.
        heads: Heads.
        vocabulary: Different tokens.
    """

    batch: int = 16
    steps: int = 32
    channels: int = 128
    heads: int = 2
    vocabulary: int = 32

    @property
    def head_features(self) -> int:
        """Features of a head."""
        return self.channels // self.heads


class RmsNorm(nn.Module):
    """RMSNorm with a weight; adds a residual first if there is one."""

    def __init__(self, channels: int, operators: Operators) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self._rmsnorm = operators.rmsnorm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return y; with a residual y and the sum."""
        return self._rmsnorm(x, self.weight, residual)


class TransformerBlock(nn.Module):
    """Causal attention, then a gated feed-forward layer, RMSNorm before each."""

    def __init__(self, sizes: Sizes, operators: Operators) -> None:
        super().__init__()
        channels, self._heads = sizes.channels, sizes.heads
        self.before_attention = RmsNorm(channels, operators)
        self.queries_keys_values = nn.Linear(channels, 3 * channels, bias=False)
        self.attended = nn.Linear(channels, channels, bias=False)
        self.before_feeding = RmsNorm(channels, operators)
        self.gate_and_up = nn.Linear(channels, 4 * channels, bias=False)
        self.down = nn.Linear(2 * channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        batch, steps, channels = x.shape
        rows = self.queries_keys_values(self.before_attention(x))
        q, k, v = rows.view(batch, steps, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, steps, channels)
        # One call adds the residual and normalises: the sum is read and written once.
        y, x = self.before_feeding(self.attended(mixed), x)
        gate, up = self.gate_and_up(y).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Rwkv6Block(nn.Module):
    """Time mixing and channel mixing of RWKV-6 (Peng et al. 2024, arXiv:2404.05892).

    Each token is mixed with the one before it, by weights that depend on the data through a
    low-rank layer; so does the decay.
    """

    RANK = 8
    MIXED = 5  # inputs of the decay, key, value, receptance and gate

    def __init__(self, sizes: Sizes, operators: Operators) -> None:
        super().__init__()
        channels, self._heads = sizes.channels, sizes.heads
        self._wkv6 = operators.wkv6
        self.before_time = nn.LayerNorm(channels)
        self.shift = nn.Parameter(torch.rand(channels))
        self.mix = nn.Parameter(torch.rand(self.MIXED, channels))
        self.mix_down = nn.Linear(channels, self.MIXED * self.RANK, bias=False)
        self.mix_up = nn.Parameter(0.1 * torch.randn(self.MIXED, self.RANK, channels))
        # exp(-exp(-6)) = 0.9975 to exp(-exp(-1)) = 0.69: channels that forget slowly and fast.
        self.decay = nn.Parameter(torch.linspace(-6.0, -1.0, channels))
        self.decay_low_rank = nn.Sequential(
            nn.Linear(channels, self.RANK, bias=False), nn.Tanh(),
            nn.Linear(self.RANK, channels, bias=False),
        )
        self.bonus = nn.Parameter(torch.linspace(-0.5, 0.5, channels).view(sizes.heads, -1))
        self.key, self.value, self.receptance, self.gate, self.output = (
            nn.Linear(channels, channels, bias=False) for _ in range(5)
        )
        self.after_heads = nn.GroupNorm(sizes.heads, channels)
        self.before_channels = nn.LayerNorm(channels)
        self.channel_mix = nn.Parameter(torch.rand(2, channels))
        self.channel_key = nn.Linear(channels, 3 * channels, bias=False)
        self.channel_value = nn.Linear(3 * channels, channels, bias=False)
        self.channel_receptance = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self._time_mixing(self.before_time(x))
        return x + self._channel_mixing(self.before_channels(x))

    def _time_mixing(self, x: Tensor) -> Tensor:
        batch, steps, channels = x.shape
        change = _before(x) - x
        low = torch.tanh(self.mix_down(x + change * self.shift))
        low = low.view(batch, steps, self.MIXED, self.RANK)
        mixes = self.mix + torch.einsum("btmr,mrc->btmc", low, self.mix_up)
        for_w, for_k, for_v, for_r, for_g = (x[:, :, None] + change[:, :, None] * mixes).unbind(2)
        heads = (batch, steps, self._heads, channels // self._heads)
        # What is learnt is the log of a rate, and the log decay is minus the rate. In fp32: near -6
        # two neighbours in bf16 are 1/32 apart, which is 3 % of the rate.
        w = -torch.exp(self.decay.float() + self.decay_low_rank(for_w).float())
        y = self._wkv6(
            self.receptance(for_r).view(heads), self.key(for_k).view(heads),
            self.value(for_v).view(heads), w.view(heads), self.bonus,
        )
        y = self.after_heads(y.reshape(batch * steps, channels)).view(x.shape)
        return self.output(y * F.silu(self.gate(for_g)))  # type: ignore[no-any-return]

    def _channel_mixing(self, x: Tensor) -> Tensor:
        change = _before(x) - x
        key = self.channel_key(x + change * self.channel_mix[0]).relu().square()
        receptance = self.channel_receptance(x + change * self.channel_mix[1]).sigmoid()
        return receptance * self.channel_value(key)  # type: ignore[no-any-return]


def _before(x: Tensor) -> Tensor:
    """At every step the token of the step before it; 0 at the first."""
    return F.pad(x, (0, 0, 1, -1))


class LanguageModel(nn.Module):
    """Embedding, one block, a norm, and a score for each token that may come next."""

    def __init__(self, sizes: Sizes, block: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.channels)
        self.block = block
        self.norm = norm
        self.head = nn.Linear(sizes.channels, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, vocabulary]."""
        return self.head(self.norm(self.block(self.embedding(tokens))))  # type: ignore[no-any-return]


def transformer(sizes: Sizes, operators: Operators) -> LanguageModel:
    """A model with the transformer block."""
    return LanguageModel(
        sizes, TransformerBlock(sizes, operators), RmsNorm(sizes.channels, operators)
    )


def rwkv6(sizes: Sizes, operators: Operators) -> LanguageModel:
    """A model with the RWKV-6 block."""
    return LanguageModel(sizes, Rwkv6Block(sizes, operators), nn.LayerNorm(sizes.channels))
