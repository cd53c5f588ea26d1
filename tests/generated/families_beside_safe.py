"""Script: compare families with the safe kernel, on a GPU or on the CPU.

    python tests/generated/families_beside_safe.py OPERATOR PASS COUNT cpu|cuda

The problems are those of the operator's population. Of the problems that a family serves, COUNT
problems with different configs or dtypes are taken, spread over the list. Their extents are halved
until the device can run the safe kernel, as far as the config's rules allow. The CPU runs the
kernels that the library would run on an H200. The script prints a line for each problem, and exits
with 1 if results disagree. A kernel for which the device is too small is skipped, as in the
library; if all kernels are skipped, that is an error.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from kgen.catalogue import open_catalogue, profile_named
from kgen.catalogue.populations import load_population, population_names

LIBRARY = Path(__file__).resolve().parents[2] / "generated"
MOST_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 22}
FLOORS = {"T": 150, "M": 5, "C": 3}  # several chunks, rows of several blocks


def main() -> int:
    """Compare the kernels; see the module's docstring."""
    sys.path.insert(0, str(LIBRARY))
    operator, pass_name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    device = torch.device(sys.argv[4])
    library = importlib.import_module("kgen_ops")
    passed = getattr(importlib.import_module(f"kgen_ops.{operator}"), pass_name.upper())
    if device.type == "cpu":
        # The rows of an H200; no rows for an operator that was not tuned on any GPU.
        h200 = next((gpu for gpu in passed.tables.gpus() if gpu.name == "h200"), None)
        passed.tables._tables["cpu", None] = passed.tables.of_gpu(
            h200, h200 is not None, profile_named("h200").names)
    else:
        device = torch.device("cuda", torch.cuda.current_device())
    facts = passed.tables.of_device(device).facts
    served: dict[tuple[str, str], Any] = {}
    catalogue = open_catalogue()
    for name in population_names(catalogue):
        for problem in load_population(name, catalogue).problems(operator, pass_name):
            found = library.explain(operator, device=device, pass_name=pass_name,
                                    **dict(problem.dims), **dict(problem.dtypes))
            if found.step == "family":
                served.setdefault((found.config, str(problem.dtypes)), problem)
    problems = list(served.items())
    step = max(1, len(problems) // count)
    is_refusal = importlib.import_module("kgen_ops._runtime.refusals").is_refusal
    agreed = []
    for (config, _), problem in problems[::step][:count]:
        try:
            line, good = compared(
                passed, device, facts, config, dict(problem.dims), dict(problem.dtypes))
        except RuntimeError as trouble:
            if not is_refusal(trouble):
                raise
            print(f"refused: {config}: {trouble}".replace("\n", " "), flush=True)
            continue
        print(line, flush=True)
        agreed.append(good)
    return int(not agreed or not all(agreed))


def compared(
    passed: Any, device: torch.device, facts: dict[str, int], config: str, dims: dict[str, int],
    dtypes: dict[str, str],
) -> tuple[str, bool]:
    """Run a family and the safe kernel; return a line, and whether they agree."""
    def module(name: str) -> Any:
        return importlib.import_module(f"kgen_ops._runtime.{name}")

    families, adaptation, rowtest = module("families"), module("adaptation"), module("rowtest")
    signature = passed.signature
    family = passed.tables.families()[config.partition("(")[0]]
    values = adaptation.named_values(family, config)

    def fits(call: Any) -> bool:
        full = adaptation.with_values(
            families.family_call(call, dtypes.items(), facts), family, values)
        return all(rule(full) for rule in (*family.admits, *family.fits))

    instance = families.Instance(family, values)
    row = families.instantiated(instance, "", dims, dtypes)._replace(fits=fits)
    small = rowtest.small_dims(signature, row, MOST_ELEMENTS[device.type], FLOORS)
    inputs = rowtest._tensors(signature, small, dtypes, device)
    if dtypes.get("cu_seqlens_dtype", "none") != "none":
        place = [argument.name for argument in signature.inputs].index("cu_seqlens")
        ends = torch.linspace(0, small["T"], small["N"] + 1)
        inputs[place] = ends.round().to(device, inputs[place].dtype)
    if dtypes.get("state_indices_dtype", "none") != "none":
        place = [argument.name for argument in signature.inputs].index("state_indices")
        inputs[place] = torch.arange(small["B"]).to(device, inputs[place].dtype) % small["S"]
    scalars = [scalar.default for scalar in signature.scalars]
    flags = rowtest._flags(signature, dtypes)
    (safe,) = (row for row in passed.tables.safe_rows() if row.dtypes == tuple(dtypes.values()))
    comparison = module("comparison")
    for size in comparison.SIZES:
        tensors = comparison.made_up_like(signature, inputs, size)
        own = comparison.updated_copies(signature, tensors)
        wanted = comparison.results(signature, own, passed.run_row(safe, own, scalars, flags))
        if comparison.are_finite(wanted):
            break
    bound = module("arguments").bind_arguments(signature, tensors, scalars, flags)
    outputs = module("allocation").allocated(signature, bound, device)
    preparer = passed._preparer
    choice = module("selection").RowChoice("family", None, instance=instance)
    ready = preparer._bind(choice, bound, preparer._call(bound, tensors), facts, device)
    module("preparing")._launch(ready, tensors, outputs, scalars)
    outputs = comparison.results(signature, tensors, outputs)
    error, bound_ = comparison.difference(outputs, wanted), comparison.tolerance(dtypes.values())
    shown = ",".join(f"{name}={value}" for name, value in {**small, **dtypes}.items())
    return f"{error:.1e} of {bound_:.0e}: {config} at {shown}", error <= bound_


if __name__ == "__main__":
    sys.exit(main())
