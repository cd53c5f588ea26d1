"""A process that compiles with NVRTC until its parent closes the pipe or kills it.

`kgen.build.children` runs this file by path with only the standard library and `kgen.runtime.nvrtc`
on sys.path, so that it starts in 50 ms; importing `kgen.build.nvrtc_child` would load all of
`kgen.build`.

A message in either direction is its length in 8 bytes, little-endian, a line of JSON, and bytes.
The first message says that this process has started, or why it cannot start. Each request gets two
answers. The first answer lets the parent tell a process that died while idle from one that died
while it compiled the source:

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
# No core files: a core of the compiler is useless and can be as large as the memory limit.
_CORE_BYTES = 0
# Limit on the temporary file of standard error.
_FILE_BYTES = 64 << 20


def pack_message(header: dict[str, Any], content: bytes = b"") -> bytes:
    """Make a message of a header and bytes."""
    body = json.dumps(header).encode() + b"\n" + content
    return LENGTH.pack(len(body)) + body


def unpack_message(body: bytes | bytearray) -> tuple[dict[str, Any], bytes]:
    """Return the header and bytes of a message whose length prefix was removed."""
    header, _, content = bytes(body).partition(b"\n")
    return json.loads(header), content


def main(library: str, memory_bytes: int) -> None:
    """Answer requests on standard input until it ends.

    Args:
        library: The NVRTC to load: the one that the parent loads, whose version is in the cache
            keys.
        memory_bytes: Memory that compilations may allocate besides the loaded libraries.
    """
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of the compiler must not mix with the answers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        compiler = nvrtc.Nvrtc(library)
    except nvrtc.NvrtcError as error:
        _send(answers, {"kind": "unusable", "log": str(error)})
        return
    _limit(memory_bytes)
    _send(answers, {"kind": "started",
                    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10})
    while length := requests.read(LENGTH.size):
        header, source = unpack_message(requests.read(LENGTH.unpack(length)[0]))
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
    answers.write(pack_message(header, content))
    answers.flush()


def _peak_bytes() -> int:
    """Peak memory of this process; rusage would include the parent's memory at the fork."""
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
    """End this process, even while it compiles, when the parent closes standard input.

    PR_SET_PDEATHSIG does not serve: it would kill this process as soon as the *thread* of the
    parent that started it ends.
    """
    try:
        parent = select.poll()
        parent.register(0, 0)  # no events: poll always reports the hang-up
        parent.poll()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
