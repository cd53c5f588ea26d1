"""Load and launch kernels through the CUDA driver API, by ctypes.

Everything runs in a device's primary context, which torch and the CUDA runtime use as well, so
torch's pointers and streams are valid here. This module does not touch CUDA before the first call
of `driver()`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, NamedTuple

DRIVER_LIBRARY = "libcuda.so.1"
SMEM_WITHOUT_OPT_IN = 48 * 1024  # static plus dynamic bytes that a CTA may use without opt-in

INVALID_CONTEXT = 201
INVALID_HANDLE = 400
COOPERATIVE_LAUNCH_TOO_LARGE = 720

_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_MULTIPROCESSOR_COUNT = 16
_SMEM_PER_BLOCK_OPTIN = 97

_FUNC_STATIC_SMEM = 1
_FUNC_REGISTERS = 4
_FUNC_MAX_DYNAMIC_SMEM = 8
_CAPTURE_RELAXED = 2


class CudaError(RuntimeError):
    """A driver call failed, or there is no driver.

    Attributes:
        code: The driver's result code; -1 if the driver could not be loaded.
    """

    def __init__(self, message: str, code: int = -1) -> None:
        super().__init__(message)
        self.code = code


class DeviceFacts(NamedTuple):
    """Properties of a device, from the driver.

    Attributes:
        ordinal: Index in the driver's order, after CUDA_VISIBLE_DEVICES.
        name: `NVIDIA H200`.
        compute_capability: (9, 0).
        sm_count: Streaming multiprocessors.
        smem_per_block: Largest shared memory of a block with opt-in, bytes.
        memory_bytes: Device memory.
    """

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    smem_per_block: int
    memory_bytes: int


class Driver:
    """The driver's entry points, each raising `CudaError` on failure. Use `driver()`."""

    def __init__(self, library: str = DRIVER_LIBRARY) -> None:
        try:
            self.library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(
                f"the CUDA driver is not usable: {error}\n"
                "  next: install an NVIDIA driver, or choose the CPU (kgen: --gpu host)"
            ) from None
        self.call("cuInit", c_uint(0))
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()

    def call(self, name: str, *args: Any, what: str = "") -> None:
        """Call an entry point with ctypes arguments.

        Raises:
            CudaError: If it does not return success; names the call, `what` and the error.
        """
        code = getattr(self.library, name)(*args)
        if code != 0:
            about = f"{what}: " if what else ""
            raise CudaError(f"{about}{name}: {error_text(self.library, code)}", code)

    @property
    def version(self) -> tuple[int, int]:
        """Newest CUDA that the driver supports: (13, 0)."""
        number = c_int()
        self.call("cuDriverGetVersion", byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def device_count(self) -> int:
        """Number of devices that this process may use."""
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def device(self, ordinal: int) -> DeviceFacts:
        """Query a device; needs no context."""
        handle = self._device_handle(ordinal)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, c_int(256), c_int(handle))
        memory = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(memory), c_int(handle))
        return DeviceFacts(
            ordinal,
            name.value.decode(),
            (self._attribute(handle, _COMPUTE_CAPABILITY_MAJOR),
             self._attribute(handle, _COMPUTE_CAPABILITY_MINOR)),
            self._attribute(handle, _MULTIPROCESSOR_COUNT),
            self._attribute(handle, _SMEM_PER_BLOCK_OPTIN),
            memory.value,
        )

    def primary_context(self, ordinal: int) -> int:
        """Return a device's primary context. It is retained once and never released.

        If it was retained before torch initialised, releasing it would destroy the context that
        torch uses. Holding it until the process ends costs nothing.
        """
        with self._lock:
            if ordinal not in self._contexts:
                context = c_void_p()
                self.call("cuDevicePrimaryCtxRetain", byref(context),
                          c_int(self._device_handle(ordinal)), what=f"cuda:{ordinal}")
                self._contexts[ordinal] = context.value or 0
            return self._contexts[ordinal]

    @contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """Make a device's primary context current for the block, then restore the former one.

        Within the block the thread's stream capture mode is relaxed, as in torch's allocator:
        another thread may be capturing a stream, and loading a module may allocate.
        """
        context = self.primary_context(ordinal)
        self.call("cuCtxPushCurrent_v2", c_void_p(context))
        mode = c_int(_CAPTURE_RELAXED)
        try:
            self.call("cuThreadExchangeStreamCaptureMode", byref(mode))
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", byref(mode))
            self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def synchronize(self, ordinal: int) -> None:
        """Wait until all work on a device has finished."""
        with self.current(ordinal):
            self.call("cuCtxSynchronize", what=f"cuda:{ordinal}")

    def _device_handle(self, ordinal: int) -> int:
        handle = c_int()
        self.call("cuDeviceGet", byref(handle), c_int(ordinal), what=f"cuda:{ordinal}")
        return handle.value

    def _attribute(self, device: int, attribute: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), c_int(attribute), c_int(device))
        return value.value


def error_text(library: Any, code: int) -> str:
    """Return the driver's text of a result code: `CUDA_ERROR_INVALID_VALUE (1): invalid ...`."""
    texts = []
    for entry, fallback in (("cuGetErrorName", "CUDA_ERROR_UNKNOWN"),
                            ("cuGetErrorString", "no description")):
        text = c_char_p()
        getattr(library, entry)(c_int(code), byref(text))
        texts.append(text.value.decode() if text.value else fallback)
    return f"{texts[0]} ({code}): {texts[1]}"


_driver: Driver | None = None
_driver_lock = threading.Lock()


def driver() -> Driver:
    """Return the process's driver, loaded at the first call.

    Raises:
        CudaError: If there is no driver, or it finds no device.
    """
    global _driver
    if _driver is None:
        with _driver_lock:
            if _driver is None:
                _driver = Driver()
    return _driver


def devices() -> list[DeviceFacts]:
    """Query every device; empty where there is no driver or no device."""
    try:
        found = driver()
        return [found.device(ordinal) for ordinal in range(found.device_count())]
    except CudaError:
        return []


class CudaModule:
    """A cubin loaded on one device; keep one per device.

    Unloading is explicit, because a CUDA graph may hold kernels of a module without references.
    """

    def __init__(self, image: bytes, ordinal: int, name: str = "module") -> None:
        """Load a cubin.

        Args:
            image: The cubin's bytes.
            ordinal: Device.
            name: For messages.
        Raises:
            CudaError: If the driver refuses it (another architecture, a damaged file).
        """
        self.ordinal = ordinal
        self.name = name
        self.driver = driver()
        self.context = self.driver.primary_context(ordinal)
        handle = c_void_p()
        with self.driver.current(ordinal):
            self.driver.call("cuModuleLoadData", byref(handle), c_char_p(image),
                             what=f"{name} on cuda:{ordinal}")
        self.handle = handle.value or 0
        self._functions: dict[str, Function] = {}

    def function(self, name: str) -> Function:
        """Return a kernel of the module by its `extern "C"` name, and load its code.

        Raises:
            CudaError: If there is no such kernel.
        """
        if name not in self._functions:
            handle = c_void_p()
            what = f"{self.name}: kernel '{name}'"
            with self.driver.current(self.ordinal):
                self.driver.call("cuModuleGetFunction", byref(handle), c_void_p(self.handle),
                                 c_char_p(name.encode()), what=what)
                # Module loading is lazy. Loading now keeps it out of a later stream capture.
                if hasattr(self.driver.library, "cuFuncLoad"):
                    self.driver.call("cuFuncLoad", handle, what=what)
            self._functions[name] = Function(handle.value or 0, name, self)
        return self._functions[name]

    def unload(self) -> None:
        """Free the module. Its functions, and graphs that captured them, must not run again."""
        handle, self.handle = self.handle, 0
        self._functions.clear()
        if handle:
            with self.driver.current(self.ordinal):
                self.driver.call("cuModuleUnload", c_void_p(handle), what=self.name)


class Function:
    """A kernel of a loaded module.

    Attributes:
        handle: CUfunction.
        name: Kernel name.
        module: Its module; the function keeps it alive.
    """

    def __init__(self, handle: int, name: str, module: CudaModule) -> None:
        self.handle = handle
        self.name = name
        self.module = module
        self.context = module.context
        self._driver = module.driver
        self._allowed_smem = 0
        self._lock = threading.Lock()

    def registers(self) -> int:
        """Registers per thread, as the driver counts them."""
        return self._attribute(_FUNC_REGISTERS)

    def allow_smem(self, smem_bytes: int) -> None:
        """Opt in to `smem_bytes` of dynamic shared memory if the default limit is too small.

        The limit never shrinks, so launches that were prepared with more stay legal.

        Raises:
            CudaError: If the device does not have that much.
        """
        with self._lock:
            static = self._attribute(_FUNC_STATIC_SMEM)
            if smem_bytes <= self._allowed_smem or smem_bytes + static <= SMEM_WITHOUT_OPT_IN:
                return
            with self._driver.current(self.module.ordinal):
                self._driver.call(
                    "cuFuncSetAttribute", c_void_p(self.handle), c_int(_FUNC_MAX_DYNAMIC_SMEM),
                    c_int(smem_bytes),
                    what=f"{self.name}: {smem_bytes} bytes of dynamic shared memory "
                         f"(and {static} static)")
            self._allowed_smem = smem_bytes

    def blocks_per_sm(self, threads: int, smem_bytes: int) -> int:
        """Occupancy: resident blocks per SM."""
        blocks = c_int()
        with self._driver.current(self.module.ordinal):
            self._driver.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(blocks),
                              c_void_p(self.handle), c_int(threads), c_size_t(smem_bytes),
                              what=self.name)
        return blocks.value

    def demand_room(self, blocks: int, threads: int, smem_bytes: int) -> None:
        """Check that all blocks of a grid can be resident at once.

        The SMs are those of the device as this process sees it: a MIG instance's, or the share
        that MPS leaves it (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE).

        Args:
            blocks: CTAs of the grid, which wait for each other.
            threads: Threads of a CTA.
            smem_bytes: Dynamic shared memory of a CTA.
        Raises:
            CudaError: If not all of them fit; its code is that of a cooperative launch that is too
                large.
        """
        sm_count = self._driver.device(self.module.ordinal).sm_count
        room = self.blocks_per_sm(threads, smem_bytes) * sm_count
        if blocks > room:
            raise CudaError(
                f"{self.name}: {blocks} blocks wait for each other at grid barriers, and the "
                f"{sm_count} SMs of this device have room for {room} at once",
                COOPERATIVE_LAUNCH_TOO_LARGE)

    def parameter_bytes(self) -> tuple[int, ...] | None:
        """Sizes of the kernel's parameters; None if the driver is older than CUDA 12.4."""
        if not hasattr(self._driver.library, "cuFuncGetParamInfo"):
            return None
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        info = self._driver.library.cuFuncGetParamInfo
        with self._driver.current(self.module.ordinal):
            # No call returns the count; the first index past the end gives an error.
            while info(c_void_p(self.handle), c_size_t(len(sizes)), byref(offset),
                       byref(size)) == 0:
                sizes.append(size.value)
        return tuple(sizes)

    def _attribute(self, attribute: int) -> int:
        value = c_int()
        with self._driver.current(self.module.ordinal):
            self._driver.call("cuFuncGetAttribute", byref(value), c_int(attribute),
                              c_void_p(self.handle), what=self.name)
        return value.value


def launch(
    function: Function, grid: tuple[int, int, int], block: tuple[int, int, int], smem_bytes: int,
    stream: int, params: ctypes.Array[c_void_p],
) -> None:
    """Launch once. `launcher.py` launches repeatedly at less host time.

    Args:
        function: The kernel.
        grid: Blocks in x, y, z; nothing is launched if one is 0.
        block: Threads in x, y, z.
        smem_bytes: Dynamic shared memory.
        stream: Raw stream; 0 is the device's default stream.
        params: Addresses of the arguments, in order.
    Raises:
        CudaError: If the driver refuses; names kernel, grid and block.
    """
    if 0 in grid:
        return
    with function.module.driver.current(function.module.ordinal):
        function.module.driver.call(
            "cuLaunchKernel", c_void_p(function.handle), *map(c_uint, grid), *map(c_uint, block),
            c_uint(smem_bytes), c_void_p(stream), params, None,
            what=f"{function.name} with grid {grid}, block {block}, {smem_bytes} bytes of dynamic "
                 "shared memory")
