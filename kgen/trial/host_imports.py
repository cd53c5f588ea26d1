"""Finds forbidden calls of system libraries in a kernel that is built for the host.

Such functions keep state from launch to launch, read a clock, or distinguish the host layer from a
GPU; a GPU has none of them. The names come from the module's dynamic symbols, so no spelling in the
source hides a call.
"""

from __future__ import annotations

import struct

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC_SYMBOLS = 11

_NAMES = """
rand srand rand_r random srandom drand48 lrand48 mrand48 getrandom arc4random getentropy getenv
secure_getenv setenv putenv unsetenv clock time gettimeofday clock_gettime timespec_get malloc
calloc realloc aligned_alloc posix_memalign strtok tmpfile getpid getppid gettid open open64 openat
fopen fopen64 fdopen creat read write pread pwrite fread fwrite shm_open memfd_create socket system
popen dlopen dlsym signal sigaction raise
"""
_REFUSED = frozenset(_NAMES.split())
# Parts of mangled names of the C++ library.
_REFUSED_PARTS = (
    "6chrono", "13random_device", "basic_fstream", "basic_ofstream", "basic_ifstream",
)


def system_calls(module: bytes) -> tuple[str, ...]:
    """Return the forbidden functions that a shared object calls; empty if it is no 64-bit ELF."""
    try:
        return tuple(
            name for name in _undefined(module)
            if name in _REFUSED or any(part in name for part in _REFUSED_PARTS)
        )
    except (struct.error, IndexError, ValueError):
        return ()


def _undefined(module: bytes) -> list[str]:
    """Names of the undefined symbols, which other libraries must define."""
    identity, *rest = _HEADER.unpack_from(module)
    if identity[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit ELF file")
    start, size, count = rest[5], rest[10], rest[11]
    heads = [_SECTION.unpack_from(module, start + i * size) for i in range(count)]
    found = []
    for head in heads:
        if head[1] != _DYNAMIC_SYMBOLS:
            continue
        names_at = heads[head[6]][4]
        for place in range(head[4], head[4] + head[5], _SYMBOL.size):
            name, _, _, section, _, _ = _SYMBOL.unpack_from(module, place)
            if name and section == 0:
                begin = names_at + name
                found.append(module[begin : module.index(b"\0", begin)].decode())
    return found
