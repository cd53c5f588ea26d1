"""Random problems through the library's functions: are they right, and how fast?

    python benchmarks/random_problems.py --op wkv6 --seed 8 --steps   # which kernels; needs no GPU
    python benchmarks/random_problems.py --op wkv6 --seed 8 --check   # beside the safe kernels
    python benchmarks/random_problems.py --op wkv6 --seed 8           # times over floors

The authors of kgen know its rows and populations; this script tests problems outside those lists.
One problem of four has extents drawn at random, most of them ragged. The others are problems of a
population with changed extents, half of them also with changed dtypes and options. --check calls
each function once with KGEN_CHECK=first; several operators may run at the same time, each in a
process of its own. Otherwise calls are timed on random and trained inputs, by CUDA events and with
a cold L2.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kgen.catalogue import Catalogue, Entry, open_catalogue, profile_named
from kgen.catalogue.populations import load_population, population_names
from kgen.check.set_limits import tensor_bytes
from kgen.emit import LoadedLibrary
from kgen.errors import KgenError
from kgen.measure.floor import floor_us, rate_tflops
from kgen.model.problem import Problem, with_dims
from kgen.verify.drawn import drawn_problems
from kgen.worker.library import library_call

GENERATED = Path(__file__).resolve().parents[1] / "generated"
MOST_BYTES = 2.5e9  # largest size of all tensors of a problem
FLUSH_BYTES = 200_000_000
HEADS = (6, 10, 12, 20, 24, 48, 80)
HEAD_SIZES = (32, 48, 64, 96, 128, 192, 256)
WIDTHS = (384, 512, 768, 1280, 2560, 3200, 4096, 4544, 6656, 12800, 18432)


def main() -> None:
    """Parse the options, and run the problems of each pass of the operator."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--op", required=True)
    parser.add_argument("--gpu", default="h200", help="whose choice of kernels is printed")
    parser.add_argument("--bandwidth", type=float, default=4280.0,
                        help="of a large copy, GB/s, for floors; default: an H200's")
    parser.add_argument("--count", type=int, default=28, help="problems of each pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", type=Path, default=GENERATED)
    parser.add_argument("--json", type=Path, help="a file for one line per problem")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--steps", action="store_true", help="only which kernels serve")
    mode.add_argument("--check", action="store_true", help="compare with the safe kernels")
    options = parser.parse_args()
    if options.check:
        os.environ["KGEN_CHECK"] = "first"
    catalogue, gpu = open_catalogue(), profile_named(options.gpu)
    entry = catalogue.entry(options.op)
    rows = []
    with LoadedLibrary.open(options.library, "--library") as library:
        for pass_ in entry.operator.signature.passes:
            for problem in chosen(catalogue, entry, pass_.name, options.count, options.seed):
                served = library.served(options.op, pass_.name, problem, gpu)
                cost = entry.operator.cost(pass_.name, problem)
                least_us = floor_us(cost, options.bandwidth, rate_tflops(cost, gpu))
                row = {"op": options.op, "pass": pass_.name, "problem": str(problem),
                       "step": served.step if served else "none",
                       "config": served.config.label if served else "",
                       "floor_us": round(least_us, 1)}
                if not options.steps:
                    row |= called(entry, pass_.name, problem, options)
                rows.append(row)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in sorted(rows, key=lambda row: -over_floor(row)):
        print(*row.values(), sep="  ")


def chosen(
    catalogue: Catalogue, entry: Entry, pass_name: str, count: int, seed: int
) -> list[Problem]:
    """The problems of a pass, which depend only on the arguments."""
    signature = entry.operator.signature
    draw = random.Random(f"{seed} {pass_name}")
    known = list(dict.fromkeys(
        problem for name in population_names(catalogue)
        for problem in load_population(name, catalogue).problems(entry.operator.name, pass_name)))
    ragged = drawn_problems(signature, known, 3 * count, seed)
    changed = changed_problems(entry, known, draw)
    pass_ = signature.pass_named(pass_name)
    found: list[Problem] = []
    while len(found) < count:
        problem = None if len(found) % 4 else next(ragged, None)
        problem = problem or next(changed)
        if tensor_bytes(problem.present(pass_), problem) <= MOST_BYTES and problem not in found:
            found.append(problem)
    return found


def changed_problems(
    entry: Entry, known: list[Problem], draw: random.Random
) -> Iterator[Problem]:
    """Yield problems of a population with changed extents, dtypes and options."""
    signature = entry.operator.signature
    choices = [tuple(chosen.items()) for chosen in signature.dtype_combinations()]
    has_heads = entry.operator.name.startswith(("wkv", "linear"))
    values: dict[str, tuple[int, ...]] = {
        "H": HEADS, "C": WIDTHS,
        **({"K": HEAD_SIZES, "E": HEAD_SIZES} if has_heads else {"N": WIDTHS})}
    factors = {"T": (0.3, 0.5, 1.5, 2), "B": (0.5, 2), "M": (0.3, 1.7, 3)}
    while True:
        base = draw.choice(known)
        dims: dict[str, int] = {}
        for name, extent in base.dims:
            if draw.random() < 0.6:
                continue
            if name in values:
                dims[name] = draw.choice(values[name])
            elif extent > 8 and name in factors and (name != "M" or not has_heads):
                dims[name] = max(1, int(extent * draw.choice(factors[name])))
        for keys, features in (("K", "V"), ("E", "M")):
            if has_heads and keys in dims and draw.random() < 0.8:
                dims |= {features: dims[keys]} if features in dict(base.dims) else {}
        dtypes = base.dtypes if draw.random() < 0.5 else draw.choice(choices)
        yield with_dims(Problem(base.dims, dtypes), dims, signature)


def over_floor(row: dict[str, Any]) -> float:
    """Time of a call over its floor plus 4 us for a launch; 0 if the call was not timed."""
    slower: float = max(row.get("random_us", 0.0), row.get("trained_us", 0.0))
    return slower / (float(row["floor_us"]) + 4)


def called(
    entry: Entry, pass_name: str, problem: Problem, options: argparse.Namespace
) -> dict[str, Any]:
    """Call the library's function once, or time it; `error` in the result says what went wrong."""
    try:
        return outcome(entry, pass_name, problem, options)
    except (KgenError, RuntimeError) as trouble:  # the next problem may succeed
        return {"error": f"{type(trouble).__name__}: {trouble}"}
    finally:
        torch.cuda.empty_cache()


def outcome(
    entry: Entry, pass_name: str, problem: Problem, options: argparse.Namespace
) -> dict[str, Any]:
    """The times of the calls; empty with --check, which only compares results."""
    device = torch.device("cuda")
    operator, pass_ = entry.operator, entry.operator.signature.pass_named(pass_name)
    present = problem.present(pass_)
    generator = torch.Generator(device=device).manual_seed(1)
    drawn = operator.make_inputs(pass_name, problem, "normal", generator, device)
    inputs = {t.name: drawn[t.name] for t in present.inputs}
    wanted = {t.name: torch.empty(0) for t in present.outputs if t.name not in inputs}
    names = {option.name: dict(problem.dtypes)[option.name]
             for option in operator.signature.options}
    kinds = {"random": inputs}
    if operator.trained is not None and not options.check:
        trained = operator.trained(pass_name, problem, inputs, generator)
        kinds["trained"] = inputs | trained
    found: dict[str, Any] = {}
    for kind, given in kinds.items():
        call = library_call(options.library, operator, pass_name, given | wanted, names)
        with torch.no_grad():
            call()
            torch.cuda.synchronize()
            if not options.check:
                found[f"{kind}_us"] = round(median_us(call, device), 1)
    return found


def median_us(call: Callable[[], object], device: torch.device) -> float:
    """The median time of 3 to 15 calls, as many as fit into 0.15 s."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    times: list[float] = []
    began = time.monotonic()
    while len(times) < 3 or (len(times) < 15 and time.monotonic() - began < 0.15):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        flush.zero_()
        events[0].record()
        call()
        events[1].record()
        torch.cuda.synchronize()
        times.append(1e3 * events[0].elapsed_time(events[1]))
    return statistics.median(times)


if __name__ == "__main__":
    main()
