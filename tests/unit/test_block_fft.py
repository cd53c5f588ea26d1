"""Fourier transforms of a block on the host layer, as the convolutions that they are for."""

from __future__ import annotations

from ctypes import c_int, c_void_p

import pytest
import torch
from host_builds import host_builds, needs_cxx
from torch import Tensor

pytestmark = needs_cxx
# Four passes of radix 4, of which the last has 2; radix 8, last 4; 16, last 4; 32, last 2.
each_size = pytest.mark.parametrize(
    ("points", "per_thread"), [(128, 4), (256, 8), (1024, 16), (2048, 32)]
)


def convolved(a: Tensor, b: Tensor, per_thread: int, half: int) -> Tensor:
    """Points times the convolution, by the kernel."""
    points = len(a)
    parts = [torch.view_as_real(x).float().contiguous() for x in (a, b)]
    y = torch.full_like(parts[0], torch.nan)
    host_builds().kernel("block_fft", f"convolve_{points}_by_{per_thread}").launch(
        grid=(1,), block=(points // per_thread,), seed=1,
        smem_bytes=8 * (points + points // 4) + 4 * (points + points // 32),
        args=[*(c_void_p(x.data_ptr()) for x in (*parts, y)), c_int(half)],
    )  # fmt: skip
    return torch.view_as_complex(y.double())


def draw(points: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(points)
    a, b = torch.randn(2, points, 2, generator=generator).double()
    return torch.view_as_complex(a), torch.view_as_complex(b)


@each_size
@pytest.mark.quick
def test_halves_are_the_cyclic_and_the_negacyclic_convolution(
    points: int, per_thread: int
) -> None:
    a, b = draw(points)
    spectra = torch.fft.fft(a, n=2 * points) * torch.fft.fft(b, n=2 * points)
    y = torch.fft.ifft(spectra) * points
    for half, sign in ((0, 1), (1, -1)):
        found = convolved(a, b, per_thread, half)
        want = y[:points] + sign * y[points:]
        # 2^-23 times two to three for the roundings of the passes, and six standard deviations.
        rms = float(want.abs().square().mean().sqrt())
        assert float((found - want).abs().max()) < 16 * 2.0**-23 * rms


@each_size
@pytest.mark.parametrize("place", [0, 1, 37])
def test_an_impulse_delays_a_row(points: int, per_thread: int, place: int) -> None:
    """All outputs, exactly where they belong, with the sign of what went around."""
    a = torch.arange(points).to(torch.complex128)
    b = torch.zeros(points, dtype=torch.complex128)
    b[place] = 1
    for half, sign in ((0, 1), (1, -1)):
        found = convolved(a, b, per_thread, half).real / points
        want = torch.cat([sign * a.real[points - place :], a.real[: points - place]])
        assert torch.equal(found.round(), want)
