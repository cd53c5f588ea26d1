"""Profiles: the summary of a trace for each contender, and the table of the summaries."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from kgen.bench import Profile, print_profile
from kgen.errors import StorageError
from kgen.measure.trace import Event, trace, trace_summary
from kgen.model.traced import Traced
from kgen.worker.tracing import traced

CPU = torch.device("cpu")


def kernel(name: str, start_us: float, took_us: float) -> Event:
    return Event(name, start_us, start_us + took_us, took_us, on_device=True)


def stretch(name: str, start_us: float, end_us: float, on_device: bool = False) -> Event:
    return Event(f"contender: {name}", start_us, end_us, 1.0, on_device)


GPU_EVENTS = [
    stretch("ours", 1000, 2000),
    stretch("ours", 1010, 1990, on_device=True),  # the GPU's copy, which is no kernel
    Event("cudaLaunchKernel", 1010, 1020, 10, on_device=False),
    kernel("walk", 1030, 300),
    kernel("walk", 1430, 300),
    kernel("sum", 1900, 50),
    stretch("loop", 3000, 9000),
    *[kernel("multiply", 3000 + 10 * i, 2) for i in range(100)],
    *[kernel("add", 3005 + 10 * i, 1) for i in range(100)],
    kernel("copy", 4005, 150),
]


def test_each_kernel_belongs_to_its_stretch() -> None:
    ours, loop = trace_summary(GPU_EVENTS, {"ours": 2, "loop": 4}, on_gpu=True)
    assert ours == Traced("ours", 2, 500.0, 1.5, 325.0, "walk", 300.0)
    # A kernel's launches count together: none of them is the longest single one.
    assert loop == Traced("loop", 4, 1500.0, 201 / 4, 450 / 4, "multiply", 50.0)


def test_a_cpu_has_operators_for_kernels() -> None:
    events = [
        stretch("ours", 0, 100),
        Event("aten::linear", 10, 90, 5, on_device=False),  # what it calls took the rest
        Event("aten::addmm", 15, 90, 75, on_device=False),
    ]
    (found,) = trace_summary(events, {"ours": 1}, on_gpu=False)
    assert found == Traced("ours", 1, 100.0, 2, 80.0, "aten::addmm", 75.0)


def test_nothing_seen_is_no_kernel() -> None:
    (found,) = trace_summary([stretch("ours", 0, 100)], {"ours": 5}, on_gpu=True)
    assert found == Traced("ours", 5, 20.0, 0.0, 0.0, "", 0.0)


def test_a_trace_on_the_cpu(tmp_path: Path) -> None:
    x = torch.randn(128, 128)

    def slow() -> None:
        time.sleep(0.03)

    path = tmp_path / "deep" / "x.pt.trace.json"
    product, sleep = trace({"product": [lambda: x @ x], "slow": [slow]}, CPU, path, lambda: None)
    assert product.largest in ("aten::mm", "aten::matmul")
    assert 0 < product.largest_us <= product.busy_us
    assert product.calls > 3
    assert (sleep.calls, sleep.largest) == (3, "")  # a slow one is not called more than needed
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"contender: product", "contender: slow", "aten::mm"} <= names


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"(?s)file/x.json.*--trace"):
        traced({"a": [lambda: None]}, {}, CPU, str(tmp_path / "file" / "x.json"), lambda: None)


PROFILE = Profile(
    "forward",
    "B=8,T=4096",
    "safe",
    "not tuned; kgen tune --op x",
    "chunked",
    {"chunk": 64},
    True,
    (
        Traced("kgen", 50, 421.04, 2, 400.0, "walk", 390.5),
        Traced("loop", 3, 98765.4, 20480, 9e4, "void at::native::" + 40 * "x", 5e4),
        Traced("quiet", 3, 10.0, 0, 0.0, "", 0.0),
    ),
    {"fla_chunk": "ImportError: no"},
    "x.pt.trace.json",
)
PRINTED = """\
forward B=8,T=4096
  chunked(chunk=64)
  not tuned; kgen tune --op x
         largest kernel                            end to end  all kernels    kernels   largest
  kgen   walk                                          421 us       400 us          2  390.5 us
  loop   void at::native::xxxxxxxxxxxxxxxxxxxx...    98.77 ms        90 ms  2.048e+04     50 ms
  quiet  -                                              10 us         0 us          0      0 us
  fla_chunk did not run: ImportError: no
  trace: x.pt.trace.json
"""


def test_printed() -> None:
    assert print_profile(PROFILE) == PRINTED
