"""The generated library on a GPU: shipped cubins, NVRTC for the rest, streams, graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from kgen.emit import Emitted, Winner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine"),
]

# In a process of its own: only one library fits into one, and the CPU tests have theirs.
SCRIPT = """
import sys
import torch
import kgen_ops

def definition(x, w, eps=1e-6):
    x64 = x.double()
    return x64 * (x64.square().mean(-1, keepdim=True) + eps).rsqrt() * w.double()

def check(y, x, w):
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[x.dtype]
    torch.testing.assert_close(y.double(), definition(x, w), rtol=tolerance, atol=1e-6)

def make(m, n, dtype, device="cuda"):
    return (torch.randn(m, n, dtype=dtype, device=device),
            torch.randn(n, dtype=dtype, device=device))

assert not torch.cuda.is_initialized()
steps = set()
for m, n, dtype in ((64, 512, torch.bfloat16), (60, 512, torch.bfloat16), (8, 16, torch.float32),
                    (7, 100, torch.float16), (3, 33, torch.bfloat16)):
    x, w = make(m, n, dtype)
    for _ in range(2):
        check(kgen_ops.rmsnorm(x, w), x, w)
    steps.add(kgen_ops.explain("rmsnorm", M=m, N=n, dtype=dtype, device="cuda").step)
assert "safe" in steps, steps

x, w = make(64, 512, torch.bfloat16)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    torch.cuda._sleep(10_000_000)
    late = x + 1  # on this stream: a launch on another one would read it too early
    y = kgen_ops.rmsnorm(late, w)
stream.synchronize()
check(y, late, w)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = kgen_ops.rmsnorm(x, w)
x.mul_(3.0).add_(0.5)
graph.replay()
torch.cuda.synchronize()
check(y, x, w)

fresh = torch.randn(4, 16, dtype=torch.float16, device="cuda"), torch.randn(16, device="cuda")
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        kgen_ops.rmsnorm(*fresh)
except kgen_ops.DispatchError as error:
    print(error)
else:
    raise AssertionError("a kernel was loaded in a capture")
print(kgen_ops.warmup("rmsnorm", M=4, N=16, dtype="fp16", w_dtype="fp32"))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = kgen_ops.rmsnorm(*fresh)
graph.replay()
torch.cuda.synchronize()
check(y, *fresh)

if torch.cuda.device_count() > 1:
    x, w = make(64, 512, torch.bfloat16, "cuda:1")
    assert torch.cuda.current_device() == 0
    check(kgen_ops.rmsnorm(x, w), x, w)

for bad in (lambda: kgen_ops.rmsnorm(x, w.cpu()), lambda: kgen_ops.rmsnorm(x.cpu(), w.cpu())):
    try:
        bad()
    except (ValueError, kgen_ops.DispatchError) as error:
        print(error)
    else:
        raise AssertionError("no error")
"""


def test_on_the_gpu(
    tmp_path: Path, emit_into: Callable[[Path, Sequence[Winner]], Emitted],
    make_winner: Callable[..., Winner],
) -> None:
    problems = ("M=64,N=512,dtype=bf16", "M=8,N=16,dtype=fp32")
    emit_into(tmp_path, [make_winner(p, gpu="h200", compiled=True) for p in problems])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "KGEN_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert "w is on cpu, but x is on cuda" in done.stdout
    assert "only h200 was tuned" in done.stdout
    assert 'kgen_ops.warmup("rmsnorm", M=4, N=16, dtype="fp16", w_dtype="fp32"' in done.stdout
