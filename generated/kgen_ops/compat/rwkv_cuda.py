"""Classes of RWKV-CUDA and RWKV-LM: [B, T, C], raw decays, no states."""

from __future__ import annotations

from torch import Tensor

from ._library import names_mistakes
from ._wkv import heads, per_head, wkv
from ._wkv4 import wkv4


class WKV:
    """RWKV-LM's `WKV` of RWKV-4, around `wkv_cuda`, by `kgen_ops.wkv4`. T has no bound here."""

    @staticmethod
    @names_mistakes
    def apply(
        B: int, T: int, C: int, w: Tensor, u: Tensor, k: Tensor, v: Tensor  # noqa: N803 - published
    ) -> Tensor:
        """Compute y.

        Args:
            B, T, C: Batch, steps, channels.
            w: [C]; raw: the log decay is -exp(w).
            u: [C].
            k, v: [B, T, C].
        Returns:
            [B, T, C].
        Raises:
            ValueError: If k is not [B, T, C].
            NotImplementedError: If the library has no wkv4.
        """
        _check("WKV.apply", (B, T, C), 1, k, "k")
        return wkv4(w, u, k, v)[0]


class WKV_5:  # noqa: N801 - the published name
    """RWKV-CUDA's `WKV_5` by `kgen_ops.wkv5`."""

    @staticmethod
    @names_mistakes
    def apply(
        B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor  # noqa: N803 - published
    ) -> Tensor:
        """Compute y.

        Args:
            B, T, C, H: Batch, steps, channels, heads.
            r, k, v: [B, T, C].
            w: [H, C / H] or [C]; raw: the decay is exp(-exp(w)).
            u: [H, C / H] or [C].
        Returns:
            [B, T, C].
        Raises:
            ValueError: If r is not [B, T, C], or H does not divide C.
            NotImplementedError: If the library has no wkv5.
        """
        _check("WKV_5.apply", (B, T, C), H, r)
        return wkv("wkv5", heads(r, H), heads(k, H), heads(v, H), per_head(w, H),
                   per_head(u, H), raw=True)[0].flatten(2)


class WKV_6:  # noqa: N801 - the published name
    """RWKV-CUDA's `WKV_6` by `kgen_ops.wkv6`."""

    @staticmethod
    @names_mistakes
    def apply(
        B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor  # noqa: N803 - published
    ) -> Tensor:
        """Compute y. As `WKV_5.apply`, but w is [B, T, C].

        Raises:
            ValueError: If r is not [B, T, C], or H does not divide C.
            NotImplementedError: If the library has no wkv6.
        """
        _check("WKV_6.apply", (B, T, C), H, r)
        return wkv("wkv6", heads(r, H), heads(k, H), heads(v, H), heads(w, H),
                   per_head(u, H), raw=True)[0].flatten(2)


def _check(
    caller: str, shape: tuple[int, int, int], count: int, r: Tensor, name: str = "r"
) -> None:
    if tuple(r.shape) != shape:
        raise ValueError(f"{caller}: {name} has shape {tuple(r.shape)}, but B, T, C = {shape}\n"
                         f"  allowed: the same; pass {name}.shape")
    if count < 1 or shape[2] % count:
        raise ValueError(f"{caller}: H = {count} does not divide C = {shape[2]}\n"
                         "  allowed: divisors of C; a head has C / H features")
