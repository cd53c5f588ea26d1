"""A process that compiles with NVRTC until its parent has no more to compile, or kills it.

Run by path, by `kgen.build.children`, with nothing but the standard library and
`kgen.runtime.nvrtc` on the path: it starts in a twentieth of a second, and importing it as
`kgen.build.nvrtc_child` would load all of `kgen.build`.

Both ways a message is its length in 8 bytes, little-endian, then a line of JSON, then bytes. First
this process says that it is ready, or why not. Then each request gets two answers, the first of
which tells a process that died idle from one that died of the source:

    {"name": "rmsnorm/x.cu", "arch": "sm_90a", "include_dirs": [...]} source
    {"kind": "begun"}
    {"kind": "compiled", "log": "...", "seconds": 0.1, "peak_bytes": 1} cubin
"""

from __future__ import annotations

import json
import os
import resource
import select
import struct
import sys
import threading
import time
from typing import IO, Any

from kgen.runtime import nvrtc

LENGTH = struct.Struct("<Q")
# Nobody reads a compiler's core, and it can be as large as the memory limit.
_CORE_BYTES = 0
# Of what the compiler writes to standard error, a temporary file.
_FILE_BYTES = 64 << 20


def packed(header: dict[str, Any], content: bytes = b"") -> bytes:
    """Make a message of a header and bytes."""
    body = json.dumps(header).encode() + b"\n" + content
    return LENGTH.pack(len(body)) + body


def unpacked(body: bytes | bytearray) -> tuple[dict[str, Any], bytes]:
    """Return the header and bytes of a message, which comes without its length."""
    header, _, content = bytes(body).partition(b"\n")
    return json.loads(header), content


def main(library: str, memory_bytes: int) -> None:
    """Answer requests on standard input until it ends.

    Args:
        library: The NVRTC to load: the parent's, whose version is in the keys of the cache.
        memory_bytes: What compilations may allocate on top of what is loaded.
    """
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the compiler prints must not end up between the answers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        compiler = nvrtc.Nvrtc(library)
    except nvrtc.NvrtcError as error:
        _send(answers, {"kind": "unusable", "log": str(error)})
        return
    _limit(memory_bytes)
    _send(answers, {"kind": "ready",
                    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10})
    while length := requests.read(LENGTH.size):
        header, source = unpacked(requests.read(LENGTH.unpack(length)[0]))
        _send(answers, {"kind": "begun"})
        answer, cubin = _compile(compiler, header, source.decode())
        answer["peak_bytes"] = _peak_bytes()
        _send(answers, answer, cubin)


def _compile(
    compiler: nvrtc.Nvrtc, header: dict[str, Any], source: str
) -> tuple[dict[str, Any], bytes]:
    start = time.perf_counter()
    cubin = b""
    try:
        cubin, log = compiler.compile_cubin(
            source, header["name"], header["arch"], header["include_dirs"])
        kind = "compiled"
    except nvrtc.CompileError as error:
        kind, log = "failed", error.log
    except nvrtc.NvrtcError as error:
        kind, log = "unusable", str(error)
    except MemoryError:
        kind, log = "failed", "std::bad_alloc"
    return {"kind": kind, "log": log, "seconds": time.perf_counter() - start}, cubin


def _send(answers: IO[bytes], header: dict[str, Any], content: bytes = b"") -> None:
    answers.write(packed(header, content))
    answers.flush()


def _peak_bytes() -> int:
    """The most memory that this process ever had; rusage would count its parent's at the fork."""
    with open("/proc/self/status", "rb") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(b"VmHWM:"))


def _limit(memory_bytes: int) -> None:
    with open("/proc/self/statm", "rb") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    for what, most in ((resource.RLIMIT_AS, taken + memory_bytes),
                       (resource.RLIMIT_CORE, _CORE_BYTES), (resource.RLIMIT_FSIZE, _FILE_BYTES)):
        _, hard = resource.getrlimit(what)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(what, (most, hard))


def _end_with_parent() -> None:
    """End this process, compiling or not, when nobody holds the other end of standard input.

    PR_SET_PDEATHSIG would kill it when the parent's *thread* that started it ends.
    """
    try:
        parent = select.poll()
        parent.register(0, 0)  # nothing but the hang-up, which is always reported
        parent.poll()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
