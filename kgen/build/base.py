"""The common part of all back ends: keys, the cache, futures, and sources of failed builds."""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from kgen.build.limits import cut
from kgen.errors import StorageError
from kgen.model.artifact import Artifact, BuildFailure, BuildRequest
from kgen.model.digest import digest_of_text
from kgen.model.record import Resources
from kgen.runtime.cache import Cache, CacheError

Outcome: TypeAlias = Artifact | BuildFailure


class Compiler(Protocol):
    """A back end. All methods may be called from any thread."""

    @property
    def name(self) -> str:
        """`nvrtc`, `nvcc`, `host` or `host-asan`."""

    @property
    def version(self) -> str:
        """`13.0.88`; for the host, the first line of the compiler's --version."""

    def identity(self, arch: str) -> str:
        """All that determines the result besides the source: version, flags, arch."""

    def key(self, request: BuildRequest) -> str:
        """Digest of source, identity and arch: the name of the result in the cache."""

    def build(self, requests: Sequence[BuildRequest], jobs: int | None = None) -> list[Outcome]:
        """Build several sources, at most `jobs` at once; outcomes in the order of the requests.

        Raises:
            ToolchainError: If the compiler cannot compile for the architecture at all.
            StorageError: If the cache cannot be written.
        """

    def submit(self, request: BuildRequest) -> Future[Outcome]:
        """Build in the background. A pending build of the same source returns the same future.

        A result in the cache is returned at once, even if many builds are waiting. The future
        raises the errors of `build`.
        """

    def close(self) -> None:
        """Cancel waiting builds and end running ones, whose futures raise ToolchainError.

        The compiler cannot be used afterwards.
        """


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compilation that succeeded."""

    content: bytes
    resources: tuple[tuple[str, Resources], ...]
    seconds: float
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A compilation that failed, with the compiler's message."""

    message: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Unit:
    """A source to be compiled, with its key."""

    key: str
    request: BuildRequest


class CachingCompiler(ABC):
    """A compiler around `_compile`, which back ends implement."""

    kind: str = "cubin"
    suffix: str = ".cubin"

    def __init__(self, include_dirs: Sequence[Path], cache: Cache, jobs: int | None) -> None:
        self.include_dirs = tuple(include_dirs)
        self.cache = cache
        self.jobs = max(1, jobs if jobs is not None else len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[str, Future[Outcome]] = {}
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def name(self) -> str:
        """See `Compiler`."""

    @property
    @abstractmethod
    def version(self) -> str:
        """See `Compiler`."""

    @abstractmethod
    def identity(self, arch: str) -> str:
        """See `Compiler`."""

    @abstractmethod
    def _compile(self, units: Sequence[Unit], jobs: int) -> list[Compiled | Failed]:
        """Compile distinct units, at most `jobs` at once."""

    def _stop(self) -> None:  # noqa: B027 (not every back end has to)
        """End the compilations of `_compile` in other threads, and let it start no more."""

    def key(self, request: BuildRequest) -> str:
        """See `Compiler`."""
        return digest_of_text(request.rendered.digest, self.identity(request.arch), request.arch)

    def build(self, requests: Sequence[BuildRequest], jobs: int | None = None) -> list[Outcome]:
        """See `Compiler`."""
        keys = [self.key(request) for request in requests]
        outcomes: dict[str, Outcome] = {}
        missing: dict[str, Unit] = {}
        for key, request in zip(keys, requests, strict=True):
            if key in outcomes or key in missing:
                continue
            found = self._cached(key)
            if found is None:
                missing[key] = Unit(key, request)
            else:
                outcomes[key] = found
        units = list(missing.values())
        if units:
            for unit, result in zip(units, self._compile(units, jobs or self.jobs), strict=True):
                outcomes[unit.key] = self._store(unit, result)
        return [outcomes[key] for key in keys]

    def submit(self, request: BuildRequest) -> Future[Outcome]:
        """See `Compiler`."""
        key = self.key(request)
        found = self._cached(key)
        if found is not None:  # without waiting for running compilations
            done: Future[Outcome] = Future()
            done.set_result(found)
            return done
        with self._lock:
            if key in self._pending:
                return self._pending[key]
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix=f"kgen-{self.name}")
            future = self._pool.submit(self._build_one, request)
            self._pending[key] = future
        # Outside the lock: a future that is already done calls its callback here.
        future.add_done_callback(lambda _: self._forget(key))
        return future

    def close(self) -> None:
        """See `Compiler`."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self._stop()
        if pool is not None:
            pool.shutdown(wait=True)

    def _build_one(self, request: BuildRequest) -> Outcome:
        return self.build([request], jobs=1)[0]

    def _forget(self, key: str) -> None:
        with self._lock:
            self._pending.pop(key, None)

    def _cached(self, key: str) -> Artifact | None:
        facts = self.cache.get(key, ".json")
        if facts is None or self.cache.get(key, self.suffix) is None:
            return None
        found = _from_json(facts)
        if found is None:
            return None
        resources, remarks = found
        return Artifact(self.kind, str(self.cache.path(key, self.suffix)), key, resources,
                        seconds=0.0, remarks=remarks)

    def _store(self, unit: Unit, result: Compiled | Failed) -> Outcome:
        try:
            if isinstance(result, Failed):
                kept = self.cache.keep("failed", f"{unit.key}.cu",
                                       unit.request.rendered.source.encode())
                return BuildFailure(unit.key, cut(result.message), str(kept), result.seconds)
            self.cache.put(unit.key, ".json", _to_json(result.resources, result.remarks))
            path = self.cache.put(unit.key, self.suffix, result.content,
                                  executable=self.kind == "exe")
        except CacheError as error:
            raise StorageError(str(error)) from None
        return Artifact(self.kind, str(path), unit.key, result.resources, result.seconds,
                        result.remarks)


_Resources: TypeAlias = tuple[tuple[str, Resources], ...]


def _to_json(resources: _Resources, remarks: tuple[str, ...]) -> bytes:
    facts = [[kernel, asdict(r)] for kernel, r in resources]
    return json.dumps({"resources": facts, "remarks": remarks}).encode()


def _from_json(text: bytes) -> tuple[_Resources, tuple[str, ...]] | None:
    """Read a cache entry; None if it is older than the field of remarks: compile it again."""
    facts = json.loads(text)
    if isinstance(facts, list):
        return None
    resources = tuple((kernel, Resources(**of_kernel)) for kernel, of_kernel in facts["resources"])
    return resources, tuple(facts["remarks"])
