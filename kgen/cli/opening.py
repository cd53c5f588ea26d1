"""What `tune`, `verify` and `bench` open before they work: operator, device, compiler, paths."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kgen.assets import include_dir
from kgen.build import CompileLimits, Compiler, open_compiler
from kgen.catalogue import Entry, open_catalogue
from kgen.cli.arguments import chosen_passes, chosen_problems
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.worker.select import select_gpu

LIBRARY = "kgen_ops"


@dataclass(frozen=True)
class Opened:
    """The common ground of a command."""

    entry: Entry
    gpu: GpuProfile
    ordinal: int
    compiler: Compiler
    passes: tuple[str, ...]
    problems: Mapping[str, tuple[Problem, ...]]  # by pass
    paths: tuple[str, ...]
    out: Path

    @property
    def reports(self) -> Path:
        """Folder of this operator's reports and journals."""
        return reports_dir(self.out, self.entry.operator.name)


def reports_dir(out: Path, operator: str) -> Path:
    """Where an operator's reports and journals lie under an output folder."""
    return out / LIBRARY / operator / "reports"


def _back_end(options: argparse.Namespace, gpu: GpuProfile) -> str:
    if gpu.is_host:
        return "host-asan" if getattr(options, "sanitize", False) else "host"
    return str(options.compiler)


def _limits(options: argparse.Namespace) -> CompileLimits:
    limits = CompileLimits()
    return CompileLimits(
        options.compile_timeout or limits.timeout_s, options.compile_memory or limits.memory_bytes
    )


@contextlib.contextmanager
def opened(options: argparse.Namespace) -> Iterator[Opened]:
    """Resolve the options that name what to work on; closes the compiler at the end.

    Raises:
        UserError: If one of them is wrong; all are checked before anything is started.
    """
    entry = open_catalogue(options.path).entry(options.op)
    operator = entry.operator
    passes = chosen_passes(operator.signature, options.pass_name)
    gpu, ordinal = select_gpu(options.gpu)
    problems = {p: chosen_problems(operator, p, options.problem, gpu.is_host) for p in passes}
    compiler = open_compiler(_back_end(options, gpu), [include_dir()], limits=_limits(options))
    try:
        yield Opened(
            entry,
            gpu,
            ordinal,
            compiler,
            tuple(passes),
            problems,
            tuple(str(Path(p).resolve()) for p in options.path),
            Path(options.out),
        )
    finally:
        compiler.close()
