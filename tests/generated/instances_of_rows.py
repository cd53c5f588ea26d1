"""Compare the families of the committed library with its rows, in a process of its own.

    python tests/generated/instances_of_rows.py OPERATOR

For the problem of each row, the family of the row's variant must give the row's kernel text and
launches, and dispatch must prefer the row. On an A100, for which there are no rows, a family must
serve the problem. The script prints the number of rows.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from kgen.catalogue import profile_named

LIBRARY = Path(__file__).resolve().parents[2] / "generated"


class Recorder:
    """A stand-in for a kernel file that records what a plan does with it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def launcher(self, *args: Any, **options: Any) -> Any:
        left_out = {"pdl": False, "coresident": 0}
        self.seen.append(("launcher", args, {**left_out, **options}))
        return lambda *values: self.seen.append(("launch", values))

    def scratch(self, elements: int, dtype: Any) -> Any:
        number = len(self.seen)
        self.seen.append(("scratch", elements, dtype))
        return lambda: type("Scratch", (), {"data_ptr": lambda _: ("workspace", number)})()


def code(text: str) -> list[str]:
    """A source without the lines that are only comments."""
    return [line for line in text.splitlines() if not line.startswith("//")]


def compare(operator: str, passed: Any, gpu: Any, row: Any) -> None:
    """Assert that the family of a row gives the row's kernel and launches."""
    families = importlib.import_module("kgen_ops._runtime.families")
    adaptation = importlib.import_module("kgen_ops._runtime.adaptation")
    problems = importlib.import_module("kgen_ops._runtime.problems")
    signature = passed.signature
    dims = dict(zip((d.name for d in signature.dims), row.dims, strict=True))
    choices = dict(zip((f.name for f in signature.choices), row.dtypes, strict=True))
    family = passed.tables.families()[row.config.partition("(")[0]]
    values = adaptation.named_values(family, row.config)
    assert values is not None, row.config
    instance = families.Instance(family, values)
    assert instance.config == row.config

    call = problems.contiguous_call(signature, dims)
    absent = {a.name for a in (*signature.inputs, *signature.outputs)
              if choices.get(a.dtype) == "none"}
    for name in list(call.__dict__):  # an absent tensor has no strides
        if name.partition("_stride_")[0] in absent:
            setattr(call, name, 0)
    full = adaptation.with_values(
        families.family_call(call, choices.items(), gpu.facts), family, values)
    assert all(rule(full) for rule in (*family.admits, *family.fits)), row.config

    root = LIBRARY / "kgen_ops"
    _, made = families.source(root, instance, dims, choices)
    shipped = root / operator / "kernels" / f"{row.kernel}.cu"
    assert code(made.decode()) == code(shipped.read_text()), row.config

    plans = []
    for bind, given in ((row.bind, call), (family.bind, full)):
        recorder = Recorder()
        tensors = range(100, 100 + len(signature.inputs) + len(signature.outputs))
        bind(recorder, given)("stream", *tensors, *map(float, range(len(signature.scalars))))
        plans.append(recorder.seen)
    assert plans[0] == plans[1], row.config


def main() -> None:
    """Compare all rows of an operator."""
    sys.path.insert(0, str(LIBRARY))
    operator = sys.argv[1]
    library = importlib.import_module("kgen_ops")
    package = importlib.import_module(f"kgen_ops.{operator}")
    profile = profile_named("a100")
    a100 = importlib.import_module("kgen_ops._runtime.rows").Gpu(
        profile.name, profile.title, profile.device_names, profile.arch, profile.names)
    count = begun = 0
    names = ("FORWARD", "BACKWARD")  # decoding has no backward pass
    for passed in (getattr(package, name) for name in names if hasattr(package, name)):
        for gpu in passed.tables.gpus():
            for row in passed.tables.rows(gpu):
                compare(operator, passed, gpu, row)
                problem = {
                    **dict(zip((d.name for d in passed.signature.dims), row.dims, strict=True)),
                    **dict(zip((f.name for f in passed.signature.choices), row.dtypes,
                               strict=True)),
                }
                found = library.explain(operator, gpu=gpu.name, pass_name=passed.name, **problem)
                assert (found.step, found.record) == ("exact", row.record), found
                elsewhere = library.explain(operator, gpu=a100, pass_name=passed.name, **problem)
                assert elsewhere.step == "family", elsewhere
                begun += bool(elsewhere.begun)
                count += 1
    assert begun > 0, "no family begins with a row of another GPU"
    print(count, begun)


if __name__ == "__main__":
    main()
