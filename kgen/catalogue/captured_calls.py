"""Read the file that `kgen_ops.capture` writes."""

from __future__ import annotations

import math
from pathlib import Path

from kgen.catalogue.catalogue import Catalogue
from kgen.catalogue.yaml_tree import Tree, read_yaml
from kgen.errors import CapturedCallsError, CatalogueError, ProblemError, with_next_step
from kgen.model.captured import CapturedCall, CapturedCalls
from kgen.model.problem import parse_problem

# The format that the library writes: `kgen/runtime/capture.py`, which this module cannot import
# without torch.
_FORMAT = 1
_KEYS = ("operator", "pass", "problem", "device", "calls", "timed", "median_us", "step", "config")


def load_captured_calls(file: Path, catalogue: Catalogue) -> CapturedCalls:
    """Load a captured file.

    Args:
        file: Path of the file.
        catalogue: Declares the operators.
    Raises:
        CapturedCallsError: If the file cannot be read, has another format, names an operator, pass
            or problem that is not known here, or holds no call; the text has file and line.
    """
    try:
        return _load(file, catalogue)
    except CapturedCallsError as error:
        raise with_next_step(error, "mend the file there, or write the file again with `with "
                             "kgen_ops.capture(FILE):`") from None


def _load(file: Path, catalogue: Catalogue) -> CapturedCalls:
    tree = read_yaml(file, CapturedCallsError)
    entries = tree.mapping()
    if "format" not in entries:
        raise tree.fail("this is no file of captured calls: 'format' is missing\n"
                        "  next: write one with `with kgen_ops.capture(FILE):`")
    if entries["format"].text() != str(_FORMAT):
        raise entries["format"].fail(
            f"format {entries['format'].text()[:40]} of captured calls is not known; this kgen "
            f"reads format {_FORMAT}\n  next: capture again with a library that this kgen has "
            "written (`kgen emit`)")
    entries = tree.fields(["format", "steps", "calls"])
    steps = _count(entries["steps"], "steps")
    calls = [_call(item, catalogue) for item in entries["calls"].sequence()]
    if not calls:
        raise entries["calls"].fail_at_key(
            "no call was captured\n  next: call operators of kgen_ops inside the block; replays of "
            "a CUDA graph are not seen")
    calls.sort(key=lambda call: -call.cost_us)
    return CapturedCalls(file.name, steps, tuple(calls))


def _call(tree: Tree, catalogue: Catalogue) -> CapturedCall:
    entries = tree.fields(_KEYS)
    try:
        operator = catalogue.operator(entries["operator"].text())
    except CatalogueError as error:
        raise entries["operator"].fail(str(error)) from None
    try:
        pass_name = operator.signature.pass_named(entries["pass"].text()).name
    except ProblemError as error:
        raise entries["pass"].fail(str(error)) from None
    try:
        problem = parse_problem(entries["problem"].text(), operator.signature)
    except ProblemError as error:
        raise entries["problem"].fail(str(error)) from None
    return CapturedCall(
        operator.name, pass_name, problem, entries["device"].text(),
        _count(entries["calls"], "calls"), _median_us(entries["median_us"]),
        entries["step"].text(), entries["config"].text())


def _count(tree: Tree, name: str) -> int:
    value = tree.scalar()
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise tree.fail(f"{name}: '{tree.text()[:40]}' is not a whole number > 0")
    return value


def _median_us(tree: Tree) -> float | None:
    value = tree.scalar()
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        value = math.nan
    if not 0 <= value < math.inf:
        raise tree.fail(f"median_us: '{tree.text()[:40]}' is neither null nor a time")
    return float(value)
