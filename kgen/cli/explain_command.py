"""`kgen explain`."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from kgen.catalogue import load_profiles, open_catalogue
from kgen.cli.context import LIBRARY
from kgen.emit import LoadedLibrary
from kgen.errors import CatalogueError, GpuError, ProblemError, suggest
from kgen.model.names import read_problem, short_name
from kgen.model.problem import parse_problem, read_extent
from kgen.model.signature import Signature

# Arguments of the library's `explain` that have options of their own.
_NOT_DIMS = frozenset({"operator", "device", "gpu", "pass_name"})


def run(options: argparse.Namespace) -> int:
    """Ask the library under `--from` which kernel serves a problem, and print its answer.

    Raises:
        CatalogueError: If there is no library, or it refuses to load.
        GpuError: If neither the library nor the profiles have the GPU.
        ProblemError: If the library does not know the operator or the problem.
    """
    signature = _signature(options.op)
    if signature is not None:
        options.problem = str(read_problem(options.problem, signature))
    problem = _parsed(options.problem)
    with LoadedLibrary.open(Path(options.source), "--from") as library:
        library.require(options.op)
        where, table = {}, ""
        if options.gpu != "auto":
            where["gpu"], table = _placed(library, options.op, options.gpu)
        try:
            answer = str(library.package.explain(
                options.op, pass_name=options.pass_name, **where, **problem))
        except (ValueError, TypeError) as error:
            raise ProblemError(str(error)) from None
    if signature is not None:
        name = short_name(parse_problem(options.problem, signature), signature)
        print(f"{options.op} {options.pass_name} {name}")
    print(answer + table)
    return 0


def _placed(library: LoadedLibrary, operator: str, name: str) -> tuple[Any, str]:
    """The GPU in the form that the library's `explain` takes, and a line about its table.

    A GPU that the operator was tuned for is passed by its name, and the line is empty.

    Raises:
        GpuError: If there is no such GPU.
    """
    tuned = library.tuned(operator)
    profiles = load_profiles()
    names = [gpu.name for gpu in tuned]
    if name in names:
        return name, ""
    if name not in profiles:
        raise GpuError(f"unknown GPU '{name}'\n  {suggest(name, {'auto', *names, *profiles})}")
    gpu = library.gpu(operator, profiles[name])
    try:
        gpus = importlib.import_module(f"{LIBRARY}._runtime.gpus")
        lent, _, _ = gpus.gpu_of(operator, operator, tuned, gpu)
    except (ImportError, AttributeError):  # the function is missing, or takes devices only
        raise CatalogueError(
            f"{LIBRARY} was written by an older kgen and explains only {', '.join(names)}\n"
            "  next: kgen emit writes it again from the same tables"
        ) from None
    capability = f"compute capability {gpu.compute_capability / 10:.1f}"
    if lent is not None:
        why = f"{lent.name}'s: {name} has none, and both are of {capability}"
    elif names:
        why = f"none: {operator} was tuned for {', '.join(names)}, none of {capability}"
    else:
        why = f"none: {operator} was not tuned for any GPU"
    return gpu, f"\n  table     {why}"


def _signature(operator: str) -> Signature | None:
    """The signature of an operator; None if kgen does not know it: a library may have others."""
    catalogue = open_catalogue()
    return catalogue.operator(operator).signature if operator in catalogue.names else None


def _parsed(text: str) -> dict[str, int | str]:
    """Read `M=8192,dtype=bf16`; the library checks the names."""
    problem: dict[str, int | str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        taken = name in problem or name in _NOT_DIMS
        if not name.isidentifier() or not equals or not value or taken:
            raise ProblemError(f"--problem '{text}': '{part}' is no name=value, or there twice\n"
                               "  example: M=8192,N=4096,dtype=bf16")
        extent = read_extent(value)
        problem[name] = value if extent is None else extent
    return problem
