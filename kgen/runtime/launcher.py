"""Prepared kernel launches: constant arguments are converted once, the others at each launch.

`make_launcher` returns the C launcher of `_launch.c` if that extension was built: 0.2 us of host
time on top of the driver's. Otherwise it returns a Python launcher with the same behaviour.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any, Protocol

from .cuda import INVALID_CONTEXT, INVALID_HANDLE, CudaError, Function, driver, error_text
from .extension import extension

MAX_ARGUMENTS = 128
MAX_GRID_EXTENT = 2**31 - 1

# Format characters as `struct` packs them, each in a slot of 8 bytes: (code, padding, wanted).
_SLOTS = {
    "p": ("Q", "", "an address (int, 0 .. 2**64 - 1)"),
    "q": ("q", "", "an int of 64 bits"),
    "i": ("i", "4x", "an int of 32 bits"),
    "f": ("f", "4x", "a float within float32's range"),
    "d": ("d", "", "a float"),
}


class Launcher(Protocol):
    """The type of the result of `make_launcher`."""

    def __call__(self, stream: int, grid_x: int, grid_y: int, grid_z: int, /, *args: Any) -> None:
        """Launch on a raw stream.

        Nothing is launched if a grid extent is 0.

        Raises:
            TypeError: If the number or kind of the arguments is not the format's.
            OverflowError: If a number does not fit its type.
            ValueError: If a grid extent is negative or beyond 2**31 - 1.
            CudaError: If the driver refuses the launch.
        """


def make_launcher(
    function: Function,
    format: str,  # noqa: A002 - what struct and ctypes users call it
    block: tuple[int, int, int],
    smem: int,
    pdl: bool = False,
    cooperative: bool = False,
) -> Launcher:
    """Prepare launches of a kernel.

    The function's module must stay loaded as long as the launcher is used.

    Args:
        function: The kernel.
        format: One character per kernel argument: p (address), q (int64), i (int32),
            f (float32), d (float64).
        block: Threads in x, y, z.
        smem: Dynamic shared memory, bytes. The caller has opted in to more than 48 KB.
        pdl: Whether to use programmatic dependent launch (sm_90 and later): the kernel may begin
            before the kernel before it in the stream has ended, and calls `griddepcontrol.wait`.
        cooperative: Whether to start no block before there is room for all of them, whatever else
            runs on the GPU: for blocks that wait for each other. A grid that can never have
            room is refused.
    Raises:
        ValueError: If format, block or smem is malformed.
    """
    compiled = compiled_launcher()
    if compiled is not None:
        launcher: Launcher = compiled(
            function.handle, format, block, smem, function.name, function.context, CudaError,
            pdl, cooperative)
        return launcher
    return PythonLauncher(function.handle, format, block, smem, function.name, function.context,
                          pdl=pdl, cooperative=cooperative)


def compiled_launcher() -> Callable[..., Any] | None:
    """Return the type `Launcher` of the C extension, or None where it was not built."""
    module = extension("_launch")
    launcher: Callable[..., Any] | None = None if module is None else module.Launcher
    return launcher


# CUlaunchConfig: grid, block, shared memory, stream, address and number of attributes. The kernel's
# arguments follow it in the same memory, so one `pack_into` converts and checks all of them.
_CONFIG = "<3i3II4xQQI4x"
_CONFIG_BYTES = struct.calcsize(_CONFIG)

# CUlaunchAttribute: its kind (CUlaunchAttributeID), and a value in a union of 64 bytes.
_ATTRIBUTE = struct.Struct("<i4xi60x")
_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6


class _Frame:
    """Storage of one launch: the launch config, the arguments in 8-byte slots, their addresses."""

    __slots__ = ("config", "memory", "params", "slots")

    def __init__(self, count: int) -> None:
        self.memory = ctypes.create_string_buffer(_CONFIG_BYTES + 8 * count)
        base = ctypes.addressof(self.memory)
        first = base + _CONFIG_BYTES
        self.slots = (c_void_p * max(count, 1))(*(first + 8 * i for i in range(count)))
        self.config = c_void_p(base)
        self.params = c_void_p(ctypes.addressof(self.slots))


class PythonLauncher:
    """The launcher in Python: about 1 us per launch.

    Two threads may launch the same kernel at once, and ctypes releases the GIL during the call, so
    threads must not share argument storage. A launch takes a frame from the free list and puts it
    back afterwards. A lock would stall other threads while the driver's queue is full, and would
    deadlock when a signal handler or a finaliser launches in the middle of a launch. Thread-local
    storage would cost a lookup. `list.pop` and `list.append` are atomic.
    """

    def __init__(
        self,
        function: int,
        format: str,  # noqa: A002
        block: tuple[int, int, int],
        smem: int,
        name: str = "kernel",
        context: int = 0,
        error: Callable[[str, int], Exception] = CudaError,
        pdl: bool = False,
        cooperative: bool = False,
        library: Any = None,
    ) -> None:
        """Prepare launches; see `make_launcher`.

        Args:
            function: CUfunction.
            format: As in `make_launcher`.
            block: Threads in x, y, z.
            smem: Dynamic shared memory, bytes.
            name: Kernel name, for messages.
            context: The function's context, made current where a launch needs it; 0 if unknown.
            error: Makes the exception from (message, code).
            pdl, cooperative: As in `make_launcher`.
            library: The driver; a test passes its own.
        """
        if len(format) > MAX_ARGUMENTS:
            raise ValueError(f"format '{format}' has {len(format)} arguments; at most "
                             f"{MAX_ARGUMENTS} are supported")
        for index, code in enumerate(format):
            if code not in _SLOTS:
                raise ValueError(
                    f"format '{format}': unknown character at {index}\n"
                    "  known: p (address), q (int64), i (int32), f (float32), d (float64)")
        if len(block) != 3 or not all(1 <= extent <= 1024 for extent in block):
            raise ValueError(f"block must be 1 .. 1024 in each direction, got {tuple(block)}")
        if not 0 <= smem <= MAX_GRID_EXTENT:
            raise ValueError(f"smem must be 0 .. 2**31 - 1 bytes, got {smem}")
        self.name = name
        self._format = format
        self._block = block
        self._smem = smem
        self._kind = (", programmatic dependent launch" if pdl else "") + (
            ", cooperative launch" if cooperative else "")
        # The constant values, in the order in which they are packed.
        self._fixed = (*block, smem)
        kinds = [kind for kind, wanted in ((_COOPERATIVE, cooperative),
                                           (_PROGRAMMATIC_STREAM_SERIALIZATION, pdl)) if wanted]
        self._attribute_memory = ctypes.create_string_buffer(
            b"".join(_ATTRIBUTE.pack(kind, 1) for kind in kinds))
        self._attributes = (
            (ctypes.addressof(self._attribute_memory), len(kinds)) if kinds else (0, 0))
        self._context = context
        self._error = error
        self._library = driver().library if library is None else library
        # cuLaunchKernelEx takes 4 arguments, cuLaunchKernel 11; ctypes costs time per argument.
        self._launch = self._library.cuLaunchKernelEx
        self._pack = struct.Struct(
            _CONFIG + "".join(_SLOTS[c][0] + _SLOTS[c][1] for c in format)).pack_into
        self._free: list[_Frame] = []
        self._function = c_void_p(function)

    def __call__(self, stream: int, grid_x: int, grid_y: int, grid_z: int, /, *args: Any) -> None:
        """Launch on a raw stream; see `Launcher`."""
        try:
            frame = self._free.pop()
        except IndexError:  # the first launch, or every frame is in use by another thread
            frame = _Frame(len(self._format))
        try:
            self._pack(frame.memory, 0, grid_x, grid_y, grid_z, *self._fixed, stream,
                       *self._attributes, *args)
            if grid_x > 0 and grid_y > 0 and grid_z > 0:
                code = self._launch(frame.config, self._function, frame.params, None)
                if code:
                    self._failed(code, (grid_x, grid_y, grid_z), frame)
            elif grid_x < 0 or grid_y < 0 or grid_z < 0:
                self._check((stream, grid_x, grid_y, grid_z), args)
        except (struct.error, OverflowError, TypeError):
            self._check((stream, grid_x, grid_y, grid_z), args)
            raise
        finally:
            self._free.append(frame)

    def _check(self, fixed: tuple[Any, Any, Any, Any], args: tuple[Any, ...]) -> None:
        """Raise the error that a launch's arguments deserve, as the C launcher does."""
        if len(args) != len(self._format):
            raise TypeError(
                f"{self.name}: takes stream, grid_x, grid_y, grid_z and {len(self._format)} "
                f"kernel arguments by position, got {len(args) + 4} arguments") from None
        stream, *grid = fixed
        if not _packs("Q", stream):
            raise TypeError(f"{self.name}: the stream must be a raw stream handle (int), got "
                            f"{stream!r}") from None
        for extent in grid:
            if not hasattr(type(extent), "__index__"):
                raise TypeError(
                    f"{self.name}: a grid extent must be an int, got {extent!r}") from None
            if not 0 <= extent <= MAX_GRID_EXTENT:
                raise ValueError(f"{self.name}: a grid extent must be 0 .. 2**31 - 1, got "
                                 f"{extent!r}") from None
        for index, (code, value) in enumerate(zip(self._format, args, strict=True)):
            char, _, want = _SLOTS[code]
            if not _packs(char, value):
                of_kind = hasattr(type(value), "__index__") or (
                    code in "fd" and isinstance(value, float))
                kind = OverflowError if of_kind else TypeError
                raise kind(f"{self.name}: kernel argument {index} must be {want}, got "
                           f"{value!r}") from None

    def _failed(self, code: int, grid: tuple[int, int, int], frame: _Frame) -> None:
        """Retry in the function's context if the context was missing or wrong, else raise."""
        if code in (INVALID_CONTEXT, INVALID_HANDLE) and self._context:
            # A thread that torch did not start has no current context; a thread that works on
            # another device has that device's context. Nothing ran, so a retry is safe.
            current = c_void_p()
            lib = self._library
            if lib.cuCtxGetCurrent(ctypes.byref(current)) == 0 and current.value != self._context:
                code = lib.cuCtxSetCurrent(c_void_p(self._context))
                if code == 0:
                    code = self._launch(frame.config, self._function, frame.params, None)
                    if current.value:
                        lib.cuCtxSetCurrent(current)
        if code:
            raise self._error(
                f"{self.name}: cuLaunchKernel: {error_text(self._library, code)}\n"
                f"  grid {grid}, block {tuple(self._block)}, {self._smem} bytes of dynamic shared "
                f"memory{self._kind}", code)


def _packs(char: str, value: Any) -> bool:
    try:
        struct.pack("<" + char, value)
    except (struct.error, OverflowError, TypeError):
        return False
    return True
