"""Which kernels serve legal calls that are in no population? Needs no GPU.

    python benchmarks/legal_calls.py --op wkv6 --count 400 [--gpu h200,a100] [--seed 3] [--list]

Draws calls that the signature allows: every dtype and option, extents from 1 to the largest that
users have, head sizes that are no powers of two. In one call of five the tensors are strided or do
not begin at a vector's alignment. Counts the calls by dispatch step, by variant, and by whether the
config obeys the efficiency rules. --list prints the calls whose largest launch has fewer CTAs than
half of the SMs, those with the most bytes per CTA first. Exits with 1 if the safe kernel or no
kernel serves a call.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kgen.catalogue import open_catalogue, profile_named
from kgen.check.set_limits import tensor_bytes
from kgen.emit import LoadedLibrary
from kgen.model.problem import Problem, with_dims
from kgen.model.signature import Signature

LIBRARY = Path(__file__).resolve().parents[1] / "generated"
MOST_BYTES = 6e9  # largest size of all tensors of a call
# Least and largest extents; `drawn` chooses the extents of other dims by their name.
EXTENTS = {"T": (1, 65536), "B": (1, 512), "C": (1, 16384), "M": (1, 131072), "N": (1, 65536)}
TIMEX_EXTENTS = {"B": (1, 512), "C": (1, 8192), "T": (1, 16384)}
WIDTHS = (384, 512, 768, 1024, 2048, 2560, 3200, 4096, 5120, 7168, 8192, 12288, 16384)
HEADS = (12, 16, 20, 24, 32, 40, 48, 64, 80, 96)
HEAD_SIZES = (32, 40, 48, 64, 64, 64, 80, 96, 128, 128, 160, 192, 256)
RARE_HEAD_SIZES = (1, 2, 3, 7, 16, 24, 33, 100, 129, 255, 257, 320, 512)
ITEMSIZES = {"fp32": 4, "fp16": 2, "bf16": 2, "int32": 4, "int64": 8}


def main() -> int:
    """Parse the options, and draw calls of each pass of the operator."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--op", required=True)
    parser.add_argument("--gpu", default="h200", help="names of profiles, with commas")
    parser.add_argument("--count", type=int, default=400, help="calls of each pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print calls that leave SMs idle")
    parser.add_argument("--library", type=Path, default=LIBRARY)
    options = parser.parse_args()
    signature = open_catalogue().operator(options.op).signature
    counts: Counter[tuple[str, ...]] = Counter()
    unserved: list[str] = []
    idle: list[tuple[float, str]] = []
    with LoadedLibrary.open(options.library, "--library") as library:
        for pass_ in signature.passes:
            asked = Asked(library, options.op, pass_.name)
            draw = random.Random(f"{options.seed} {options.op} {pass_.name}")
            problems = drawn(options.op, signature, draw)
            for problem in (next(problems) for _ in range(options.count)):
                size = tensor_bytes(problem.present(pass_), problem)
                call = asked.call(problem, draw)
                for gpu in options.gpu.split(","):
                    served = asked.served(problem, call, gpu)
                    what = f"{gpu} {pass_.name} {problem}: {served['config']}"
                    counts[gpu, pass_.name, served["step"], served["variant"],
                           "" if served["suits"] else "breaks rules of efficiency"] += 1
                    if served["step"] in ("safe", "none"):
                        unserved.append(what)
                    elif served["ctas"] and 2 * served["ctas"] < served["sm_count"]:
                        idle.append((size / served["ctas"], what))
    for key, count in sorted(counts.items()):
        print(count, *key)
    for bytes_per_cta, what in sorted(idle, reverse=True) if options.list else ():
        print(f"{bytes_per_cta / 1e3:.0f} KB per CTA: {what}")
    for what in unserved:
        print(f"unserved: {what}")
    return int(bool(unserved))


def drawn(operator: str, signature: Signature, draw: random.Random) -> Iterator[Problem]:
    """Yield problems that the signature allows, without end; bf16 is twice as likely as others."""
    combinations = [dict(chosen) for chosen in signature.dtype_combinations()]
    extents = TIMEX_EXTENTS if operator == "timex" else EXTENTS
    while True:
        dtype = draw.choice(("bf16", "bf16", "fp16", "fp32"))
        dtypes = draw.choice([each for each in combinations if each["dtype"] == dtype])
        dims: dict[str, int] = {}
        for name in (dim.name for dim in signature.dims):
            if name in ("K", "E"):
                dims[name] = draw.choice(HEAD_SIZES if draw.random() < 0.85 else RARE_HEAD_SIZES)
            elif name == "V" or (name == "M" and "E" in dims):
                keys = dims.get("K", dims.get("E", 64))
                dims[name] = keys if draw.random() < 0.8 else draw.choice(
                    HEAD_SIZES + RARE_HEAD_SIZES)
            elif name == "H":
                dims[name] = draw.choice((draw.randint(1, 8), draw.choice(HEADS)))
            elif name in ("N", "C") and operator in ("rmsnorm", "wkv4") and draw.random() < 0.4:
                dims[name] = draw.choice(WIDTHS)
            elif name == "T" and operator.endswith("decode"):
                dims[name] = draw.choice((1, 1, 1, 2, 3, 4, 5, 8, 16))
            elif name in extents:
                dims[name] = extent(draw, *extents[name])
            else:
                dims[name] = dims["B"] + draw.choice((0, 0, 1, 7))  # the pool of decode states
        if dtypes.get("cu_seqlens_dtype", "none") != "none":
            dims |= {"N": dims["B"], "B": 1}
        elif operator != "rmsnorm" and "N" in dims:
            dims["N"] = dims["B"]
        problem = with_dims(
            Problem(tuple(dims.items()), tuple(dtypes.items())), {}, signature)
        if all(tensor_bytes(problem.present(pass_), problem) <= MOST_BYTES
               for pass_ in signature.passes):
            yield problem


def extent(draw: random.Random, least: int, most: int) -> int:
    """A power of two, or a number that is uniform in its logarithm and often odd."""
    number = round(math.exp(draw.uniform(math.log(least), math.log(most))))
    power = 1 << draw.randint(0, most.bit_length() - 1)
    return min(max(draw.choice((power, number, number | 1)), least), most)


class Asked:
    """A pass of the library that is asked which kernel would serve a call."""

    def __init__(self, library: LoadedLibrary, operator: str, pass_name: str) -> None:
        self._library, self._operator = library, operator
        self._pass = library.passed(operator, pass_name)
        names = ("adaptation", "families", "gpus", "launches", "problems", "rows", "selection")
        self._runtime = {name: importlib.import_module(f"kgen_ops._runtime.{name}")
                         for name in names}

    def call(self, problem: Problem, draw: random.Random) -> Any:
        """The pointers and strides of a call: one of five is neither contiguous nor aligned."""
        call = self._runtime["problems"].contiguous_call(
            self._pass.signature, dict(problem.dims))
        if draw.random() < 0.8:
            return call
        dtypes = dict(problem.dtypes)
        for tensor in self._pass.signature.inputs:
            itemsize = ITEMSIZES.get(dtypes.get(tensor.dtype, tensor.dtype), 4)
            call.__dict__[f"{tensor.name}_ptr"] = itemsize * draw.choice((0, 1, 2, 8)) % 32
            more = draw.choice((0, 1, 8, 64))
            for dim in tensor.free_strides:
                if call.__dict__[f"{tensor.name}_stride_{dim}"] > 1 and dim != "H":
                    call.__dict__[f"{tensor.name}_stride_{dim}"] += more
        return call

    def served(self, problem: Problem, call: Any, gpu_name: str) -> dict[str, Any]:
        """The dispatch step, the config, and facts of the config; step `none` without a kernel.

        The facts are the variant, whether the config obeys the efficiency rules, and the number of
        CTAs of its largest launch.
        """
        runtime, signature = self._runtime, self._pass.signature
        gpu = self._library.gpu(self._operator, profile_named(gpu_name))
        tuned = self._pass.tables.gpus()
        if isinstance(gpu, str):
            (gpu,) = (known for known in tuned if known.name == gpu)
        table = self._pass.tables.of_gpu(*runtime["gpus"].gpu_of(
            signature.function, self._operator, tuned, gpu))
        dims = tuple(dict(problem.dims)[dim.name] for dim in signature.dims)
        dtypes = tuple(dict(problem.dtypes)[field.name] for field in signature.choices)
        found = {"step": "none", "config": "", "variant": "", "suits": True, "ctas": 0,
                 "sm_count": table.facts["sm_count"]}
        try:
            choice = next(runtime["selection"].candidates(
                signature, self._operator, table, self._pass.tables, dims, dtypes, call))
        except self._library.package.DispatchError:
            return found
        variant = choice.config.partition("(")[0]
        found |= {"step": choice.step, "config": choice.config, "variant": variant}
        family = self._pass.tables.families().get(variant)
        values = family and runtime["adaptation"].named_values(family, choice.config)
        if values is None:
            return found
        rules = runtime["adaptation"].FamilyRules(family, runtime["families"].family_call(
            call, problem.dtypes, table.facts))
        made = runtime["launches"].launches_of(family, rules.call_of(values)).made
        largest = max(made, key=lambda launched: launched.ctas * launched.threads, default=None)
        return found | {"suits": rules.suits(values), "ctas": largest.ctas if largest else 0}


if __name__ == "__main__":
    sys.exit(main())
