"""Fourier transforms of a block on the host layer, as the convolutions that they are for."""

from __future__ import annotations

from ctypes import c_void_p

import pytest
import torch
from host_builds import host_builds, needs_cxx
from torch import Tensor

pytestmark = needs_cxx
# Radix 4, the last pass 2; radix 8, last 4 and 8; radix 16, last 2, 4, 8 and 2; radix 32, last 2.
each_size = pytest.mark.parametrize(
    ("points", "per_thread", "wide"),
    [
        (128, 4, True), (256, 8, False), (512, 8, True), (512, 16, True), (512, 16, False),
        (1024, 16, True), (2048, 16, False), (2048, 32, True), (8192, 16, True)
    ],
)  # fmt: skip


def smem_bytes(points: int, per_thread: int, wide: bool) -> int:
    roots = points // per_thread * (per_thread.bit_length() - 1) + points // 32 + 256
    line = 8 * (points + points // 16) if wide else 4 * (points + points // 32)
    return 8 * (points + roots) + line


def convolved(a: Tensor, b: Tensor, per_thread: int, wide: bool) -> Tensor:
    """Points times the convolution, and what goes around as the imaginary part, by the kernel."""
    points = len(a)
    rows = [x.float().contiguous() for x in (a, b)]
    y = torch.full((points, 2), torch.nan)
    name = f"convolve_{points}_by_{per_thread}_{str(wide).lower()}"
    host_builds().kernel("block_fft", name).launch(
        grid=(1,), block=(points // per_thread,), seed=1,
        smem_bytes=smem_bytes(points, per_thread, wide),
        args=[c_void_p(x.data_ptr()) for x in (*rows, y)],
    )  # fmt: skip
    return torch.view_as_complex(y.double())


def draw(points: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(points)
    a, b = torch.randn(2, points, generator=generator).double()
    return a, b


@each_size
@pytest.mark.quick
def test_the_real_part_is_the_convolution_and_the_imaginary_part_what_goes_around(
    points: int, per_thread: int, wide: bool
) -> None:
    a, b = draw(points)
    spectra = torch.fft.rfft(a, n=2 * points) * torch.fft.rfft(b, n=2 * points)
    y = torch.fft.irfft(spectra) * points
    found = convolved(a, b, per_thread, wide)
    want = torch.complex(y[:points], -y[points:])
    # 2^-23 times two to three for the roundings of the passes, and six standard deviations.
    rms = float(want.abs().square().mean().sqrt())
    assert float((found - want).abs().max()) < 16 * 2.0**-23 * rms


@each_size
@pytest.mark.parametrize("place", [0, 1, 37])
def test_an_impulse_delays_a_row(points: int, per_thread: int, wide: bool, place: int) -> None:
    """All outputs, exactly where they belong; what went around is imaginary."""
    a = torch.arange(points).double()
    b = torch.zeros(points, dtype=torch.float64)
    b[place] = 1
    found = convolved(a, b, per_thread, wide) / points
    want = torch.zeros(points, dtype=torch.complex128)
    want.real[place:] = a[: points - place]
    want.imag[:place] = -a[points - place :]
    assert torch.equal(found.real.round(), want.real)
    assert torch.equal(found.imag.round(), want.imag)
