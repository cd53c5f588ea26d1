"""Requests and results of a build."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.model.record import Resources


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered kernel source.

    Attributes:
        name: `rmsnorm/forward_rows_in_registers`, for messages.
        source: The CUDA text; includes `kgen/*.cuh` by name.
        digest: Digest of the source and of every kgen header that it includes, transitively.
        bare: Digest of the same texts without comments, blank space and the headers' paths. A build
            for the host has no cubin, so `bare` takes the place of its machine-code digest.
    """

    name: str
    source: str
    digest: str
    bare: str = ""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """A source to be built for one architecture (`sm_90a`, or `host`)."""

    rendered: Rendered
    arch: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """A built module.

    Attributes:
        kind: `cubin` (loaded by the driver) or `so` (loaded by the host layer).
        path: Path of the module in the content-addressed cache.
        key: Digest of source, compiler, flags and arch.
        resources: (kernel, the compiler's resource report); empty for the host.
        seconds: Time of the compilation; 0.0 if the module came from the cache.
        remarks: Performance remarks of the compiler with their codes, for instance that it
            serialises wgmma instructions.
    """

    kind: str
    path: str
    key: str
    resources: tuple[tuple[str, Resources], ...]
    seconds: float
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """A failed build: the compiler's message, and the path of the kept source."""

    key: str
    message: str
    source_path: str
    seconds: float
