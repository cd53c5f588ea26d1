"""Both launchers against a fake driver: what reaches cuLaunchKernel, and every refusal."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kgen.runtime.cuda import CudaError
from kgen.runtime.extension import build_extension
from kgen.runtime.launcher import PythonLauncher

FAKE_DRIVER = r"""
#include <string.h>
static struct Record {
    unsigned long long calls, function, stream, context;
    unsigned grid[3], block[3], smem, attributes, kinds[2], on[2];
    unsigned char values[128][8];
} record;
static int count, result, refuse_context;
static __thread void *current;

struct Record *fake_record(void) { return &record; }
void fake_setup(int n, int code, int refuse) {
    count = n; result = code; refuse_context = refuse; current = 0;
    memset(&record, 0, sizeof record);
}
void fake_enter(void *context) { current = context; }
void *fake_current(void) { return current; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned smem, void *stream, void **params, void **extra) {
    (void)extra;
    record.calls++;
    if (refuse_context && current != (void *)0xC0) return current ? 400 : 201;
    record.function = (unsigned long long)f;
    record.stream = (unsigned long long)stream;
    record.context = (unsigned long long)current;
    record.grid[0] = gx; record.grid[1] = gy; record.grid[2] = gz;
    record.block[0] = bx; record.block[1] = by; record.block[2] = bz;
    record.smem = smem;
    for (int i = 0; i < count; ++i) memcpy(record.values[i], params[i], 8);
    return result;
}
struct Attribute { unsigned kind, padding; unsigned value[16]; };
struct Config {
    unsigned grid[3], block[3], smem; void *stream; struct Attribute *attrs; unsigned attr_count;
};
int cuLaunchKernelEx(const struct Config *c, void *f, void **params, void **extra) {
    record.attributes = c->attr_count;
    for (unsigned i = 0; i < c->attr_count && i < 2; ++i) {
        record.kinds[i] = c->attrs[i].kind;
        record.on[i] = c->attrs[i].value[0];
    }
    return cuLaunchKernel(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
                          c->block[2], c->smem, c->stream, params, extra);
}
int cuGetErrorName(int code, const char **text) {
    *text = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER"; return 0;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 1 ? "invalid argument" : "another error"; return 0;
}
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
"""
# The same entry point for the test with threads: it lingers, and checks that nobody wrote into the
# arguments meanwhile.
LINGERING_DRIVER = r"""
#include <unistd.h>
static volatile unsigned long long torn, calls;
unsigned long long fake_torn(void) { return torn; }
unsigned long long fake_calls(void) { return calls; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned smem, void *stream, void **params, void **extra) {
    unsigned long long before = *(unsigned long long *)params[0];
    usleep(200);
    if (*(volatile unsigned long long *)params[0] != before ||
        *(volatile unsigned long long *)params[1] != before) __sync_fetch_and_add(&torn, 1);
    __sync_fetch_and_add(&calls, 1);
    return 0;
}
int cuLaunchKernelEx(const void *c, void *f, void **params, void **extra) {
    return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, params, extra);
}
"""
FUNCTION, CONTEXT, STREAM = 0x7F0000001000, 0xC0, 0x7FEE00000040
COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CUlaunchAttributeID

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


class Record(ctypes.Structure):
    _fields_ = [
        ("calls", ctypes.c_uint64), ("function", ctypes.c_uint64), ("stream", ctypes.c_uint64),
        ("context", ctypes.c_uint64), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint), ("attributes", ctypes.c_uint),
        ("kinds", ctypes.c_uint * 2), ("on", ctypes.c_uint * 2),
        ("values", (ctypes.c_char * 8) * 128),
    ]


def compile_driver(folder: Path, name: str, text: str) -> Path:
    source = folder / f"{name}.c"
    source.write_text(text)
    out = folder / f"lib{name}.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(out)], check=True)
    return out


@pytest.fixture(scope="module")
def driver_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("driver"), "fake", FAKE_DRIVER)


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = build_extension(tmp_path_factory.mktemp("extension"), "_launch")
    spec = importlib.util.spec_from_file_location("_launch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Fake:
    """A launcher under test, with the driver behind it."""

    def __init__(self, make: Callable[..., Any], library: Any) -> None:
        self.make = make
        self.library = library
        library.fake_record.restype = ctypes.POINTER(Record)
        library.fake_current.restype = ctypes.c_void_p

    def launcher(self, types: str, block: tuple[int, ...] = (128, 2, 1), smem: int = 4096,
                 result: int = 0, refuse: bool = False, pdl: bool = False,
                 cooperative: bool = False) -> Any:
        self.library.fake_setup(len(types), result, int(refuse))
        return self.make(FUNCTION, types, block, smem, "scale", CONTEXT, CudaError, pdl,
                         cooperative)

    @property
    def record(self) -> Record:
        record: Record = self.library.fake_record().contents
        return record


@pytest.fixture(params=["c", "python"])
def fake(request: pytest.FixtureRequest, driver_path: Path, extension: Any) -> Fake:
    library = ctypes.CDLL(str(driver_path))
    if request.param == "c":
        extension.set_driver(str(driver_path))
        return Fake(extension.Launcher, library)
    return Fake(functools.partial(PythonLauncher, library=library), library)


def raw(fake: Fake, index: int) -> bytes:
    address = ctypes.addressof(fake.record.values[index])
    return ctypes.string_at(address, 8)


def test_everything_reaches_the_driver(fake: Fake) -> None:
    launcher = fake.launcher("pqifd")
    address = 2**63 + 256
    launcher(STREAM, 2**31 - 1, 7, 3, address, -(2**62), -5, 0.1, math.pi)
    record = fake.record
    assert (record.function, record.stream, record.smem) == (FUNCTION, STREAM, 4096)
    assert tuple(record.grid) == (2**31 - 1, 7, 3)
    assert tuple(record.block) == (128, 2, 1)
    assert struct.unpack("<Q", raw(fake, 0))[0] == address
    assert struct.unpack("<q", raw(fake, 1))[0] == -(2**62)
    assert struct.unpack("<i", raw(fake, 2)[:4])[0] == -5
    assert raw(fake, 3)[:4] == struct.pack("<f", 0.1)
    assert struct.unpack("<d", raw(fake, 4))[0] == math.pi


def test_no_arguments_and_many(fake: Fake) -> None:
    fake.launcher("")(0, 1, 1, 1)
    assert fake.record.calls == 1
    fake.launcher("q" * 128)(0, 1, 1, 1, *range(128))
    assert [struct.unpack("<q", raw(fake, i))[0] for i in range(128)] == list(range(128))


def test_nonfinite_floats_and_ints_for_floats(fake: Fake) -> None:
    fake.launcher("fff")(0, 1, 1, 1, math.inf, math.nan, 3)
    assert struct.unpack("<f", raw(fake, 0)[:4])[0] == math.inf
    assert math.isnan(struct.unpack("<f", raw(fake, 1)[:4])[0])
    assert struct.unpack("<f", raw(fake, 2)[:4])[0] == 3.0


@pytest.mark.parametrize("grid", [(0, 1, 1), (4, 0, 1), (4, 4, 0)])
def test_an_empty_grid_launches_nothing(fake: Fake, grid: tuple[int, int, int]) -> None:
    fake.launcher("p")(0, *grid, 1)
    assert fake.record.calls == 0


@pytest.mark.parametrize(
    ("types", "args", "error", "text"),
    [
        ("pq", (1,), TypeError, "2 kernel arguments by position, got 5 arguments"),
        ("pq", (1, 2, 3), TypeError, "got 7 arguments"),
        ("pq", (1, 2.5), TypeError, "kernel argument 1 must be an int of 64 bits, got 2.5"),
        ("pq", (1, 2**63), OverflowError, "kernel argument 1 must be an int of 64 bits"),
        ("pi", (1, 2**31), OverflowError, "argument 1 must be an int of 32 bits, got 2147483648"),
        ("pi", (1, -(2**31) - 1), OverflowError, "argument 1 must be an int of 32 bits"),
        ("p", (-1,), OverflowError, r"argument 0 must be an address \(int, 0 .. 2\*\*64 - 1\)"),
        ("p", (None,), TypeError, "argument 0 must be an address"),
        ("f", ("x",), TypeError, "argument 0 must be a float within float32's range, got 'x'"),
        ("f", (1e39,), OverflowError, "argument 0 must be a float within float32's range"),
        ("d", (None,), TypeError, "argument 0 must be a float, got None"),
    ],
)
def test_bad_arguments(
    fake: Fake, types: str, args: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    launcher = fake.launcher(types)
    with pytest.raises(error, match=f"scale: .*{text}"):
        launcher(0, 1, 1, 1, *args)
    assert fake.record.calls == 0


@pytest.mark.parametrize(
    ("stream", "grid", "error", "text"),
    [
        ("s", (1, 1, 1), TypeError, "the stream must be a raw stream handle"),
        (-1, (1, 1, 1), TypeError, "the stream must be a raw stream handle"),
        (0, (-1, 1, 1), ValueError, r"a grid extent must be 0 .. 2\*\*31 - 1, got -1"),
        (0, (1, 2**31, 1), ValueError, "got 2147483648"),
        (0, (1, 2**80, 1), ValueError, "a grid extent must be"),
    ],
)
def test_bad_stream_and_grid(
    fake: Fake, stream: Any, grid: tuple[int, ...], error: type[Exception], text: str
) -> None:
    launcher = fake.launcher("")
    with pytest.raises(error, match=text):
        launcher(stream, *grid)
    assert fake.record.calls == 0


@pytest.mark.parametrize(
    ("types", "block", "smem", "text"),
    [
        ("px", (1, 1, 1), 0, "format 'px': unknown character at 1\n  known: p"),
        ("p" * 129, (1, 1, 1), 0, "has 129 arguments; at most 128"),
        ("p", (0, 1, 1), 0, "block must be 1 .. 1024"),
        ("p", (1025, 1, 1), 0, "block must be 1 .. 1024"),
        ("p", (1, 1, 1), -1, "smem must be 0 .. "),
    ],
)
def test_bad_preparation(
    fake: Fake, types: str, block: tuple[int, int, int], smem: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        fake.launcher(types, block, smem)


def test_the_drivers_refusal_names_kernel_grid_and_block(fake: Fake) -> None:
    launcher = fake.launcher("p", result=1)
    with pytest.raises(CudaError) as caught:
        launcher(0, 5, 6, 7, 1)
    assert caught.value.code == 1
    assert str(caught.value) == (
        "scale: cuLaunchKernel: CUDA_ERROR_INVALID_VALUE (1): invalid argument\n"
        "  grid (5, 6, 7), block (128, 2, 1), 4096 bytes of dynamic shared memory")


def test_a_pdl_launch_passes_its_attribute_to_the_driver(fake: Fake) -> None:
    fake.launcher("pf", pdl=True)(STREAM, 5, 6, 7, 2**40, 0.5)
    record = fake.record
    assert (record.calls, record.attributes) == (1, 1)
    assert (record.kinds[0], record.on[0]) == (PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    assert (record.function, record.stream, record.smem) == (FUNCTION, STREAM, 4096)
    assert (tuple(record.grid), tuple(record.block)) == ((5, 6, 7), (128, 2, 1))
    assert struct.unpack("<Q", raw(fake, 0))[0] == 2**40
    assert raw(fake, 1)[:4] == struct.pack("<f", 0.5)


@pytest.mark.parametrize(("pdl", "kinds"), [
    (False, [COOPERATIVE]), (True, [COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION])])
def test_a_cooperative_launch_passes_its_attribute(
    fake: Fake, pdl: bool, kinds: list[int]
) -> None:
    fake.launcher("p", pdl=pdl, cooperative=True)(STREAM, 5, 6, 7, 1)
    record = fake.record
    assert (record.calls, record.attributes) == (1, len(kinds))
    assert [*record.kinds][:len(kinds)] == kinds
    assert [*record.on][:len(kinds)] == [1] * len(kinds)
    launcher = fake.launcher("p", result=1, cooperative=True)
    with pytest.raises(CudaError, match=r"4096 bytes .* memory, cooperative launch"):
        launcher(0, 5, 6, 7, 1)


def test_any_other_launch_has_no_attributes(fake: Fake) -> None:
    fake.launcher("p")(STREAM, 1, 1, 1, 1)
    assert (fake.record.calls, fake.record.attributes) == (1, 0)


def test_a_pdl_launch_keeps_its_attribute_when_retried(fake: Fake) -> None:
    fake.launcher("q", refuse=True, pdl=True)(0, 1, 1, 1, 9)
    assert (fake.record.calls, fake.record.context, fake.record.attributes) == (2, CONTEXT, 1)
    launcher = fake.launcher("p", result=1, pdl=True)
    with pytest.raises(CudaError, match=r"4096 bytes .* memory, programmatic dependent launch"):
        launcher(0, 5, 6, 7, 1)


def test_a_driver_that_knows_no_attributes(extension: Any, tmp_path: Path) -> None:
    old = "int cuLaunchKernel(void) { return 0; }"
    extension.set_driver(str(compile_driver(tmp_path, "old", old)))
    extension.Launcher(FUNCTION, "p", (1, 1, 1), 0)(0, 1, 1, 1, 1)
    with pytest.raises(OSError, match=r"no cuLaunchKernelEx, .* CUDA 11\.8"):
        extension.Launcher(FUNCTION, "p", (1, 1, 1), 0, pdl=True)
    with pytest.raises(OSError, match=r"cooperative launches need; .* CUDA 11\.8"):
        extension.Launcher(FUNCTION, "p", (1, 1, 1), 0, cooperative=True)


def test_a_thread_without_context_gets_and_keeps_the_kernels(fake: Fake) -> None:
    launcher = fake.launcher("q", refuse=True)
    launcher(0, 1, 1, 1, 9)
    assert fake.record.calls == 2
    assert fake.record.context == CONTEXT
    launcher(0, 1, 1, 1, 9)
    assert fake.record.calls == 3


def test_another_devices_context_is_put_back(fake: Fake) -> None:
    launcher = fake.launcher("q", refuse=True)
    fake.library.fake_enter(ctypes.c_void_p(0xD0))
    launcher(0, 1, 1, 1, 9)
    assert fake.record.context == CONTEXT
    assert fake.library.fake_current() == 0xD0
    fake.library.fake_enter(None)


@pytest.mark.parametrize("which", ["c", "python"])
def test_threads_do_not_share_arguments(which: str, extension: Any, tmp_path: Path) -> None:
    path = compile_driver(tmp_path, f"linger_{which}", LINGERING_DRIVER)
    library = ctypes.CDLL(str(path))
    if which == "c":
        extension.set_driver(str(path))
        launcher = extension.Launcher(FUNCTION, "qq", (1, 1, 1), 0)
    else:
        launcher = PythonLauncher(FUNCTION, "qq", (1, 1, 1), 0, library=library)

    def work(number: int) -> None:
        for _ in range(50):
            launcher(0, 1, 1, 1, number, number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert library.fake_calls() == 200
    assert library.fake_torn() == 0


def test_a_missing_driver_is_an_oserror(extension: Any) -> None:
    with pytest.raises(OSError, match=r"cannot load the CUDA driver: .*nowhere"):
        extension.set_driver("/nowhere/libcuda.so.1")


def test_build_extension_without_compiler(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no C compiler \(no-such-cc\)"):
        build_extension(tmp_path, "_launch", compiler="no-such-cc")


def test_launches_leave_nothing_behind(fake: Fake) -> None:
    """Arguments, refusals and their messages: a reference kept of one is an object a call."""
    launcher = fake.launcher("pqf", result=0)

    def call() -> None:
        launcher(STREAM, 1000, 1, 1, 2**40, 2**41, 0.25)
        with contextlib.suppress(TypeError):
            launcher(STREAM, 1000, 1, 1, 2**40, 2**41, "x")

    for _ in range(100):
        call()
    before = sys.getallocatedblocks()
    for _ in range(5000):
        call()
    assert sys.getallocatedblocks() - before < 100
