"""The current stream and device at little host cost; `torch.cuda.current_stream()` takes 7 us."""

from __future__ import annotations

from collections.abc import Callable

import torch

# A build of PyTorch without CUDA lacks these functions; its only device index is -1, the CPU's.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
# Whether torch's current stream is capturing a CUDA graph.
capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", lambda: False
)


def several_devices(device: int) -> bool:
    """Whether a device other than this one may be current; the CPU is -1."""
    return device >= 0 and torch.cuda.device_count() > 1


def raw_stream(device: int) -> int:
    """Return torch's current stream of a device as a raw driver handle; 0 for the CPU (-1)."""
    return stream_getter(device)(device)


def stream_getter(device: int) -> Callable[[int], int]:
    """Return the function that `raw_stream` calls for this device; a prepared launch keeps it."""
    return _raw_stream if _raw_stream is not None and device >= 0 else _no_stream


def _no_stream(device: int) -> int:
    return 0


def on_device(run: Callable[..., None], device: int) -> Callable[..., None]:
    """Wrap a launch so that it runs on `device` even if another device is current."""

    def run_there(stream: int, *arguments: float) -> None:
        if current_device() == device:
            run(stream, *arguments)
        else:
            with torch.cuda.device(device):
                run(stream, *arguments)

    return run_there
