"""Read searches that other tuners wrote: T4 results and Kernel Tuner's cache files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kgen.errors import RecordError, why_unreadable
from kgen.model.config import Config
from kgen.model.record import Fate, Record, Timing
from kgen.report.exchange import ABSENT, VARIANT
from kgen.report.searches import Search
from kgen.report.studies import StudyOf

_FATES: Mapping[str, Fate] = {
    "correct": Fate.VERIFIED,
    "constraints": Fate.REJECTED,
    "compile": Fate.BUILD_FAILED,
    "correctness": Fate.WRONG,
    "timeout": Fate.TIMED_OUT,
    "runtime": Fate.CRASHED,
}
_ERRORS: Mapping[str, Fate] = {
    "InvalidConfig": Fate.REJECTED,
    "CompilationFailedConfig": Fate.BUILD_FAILED,
    "RuntimeFailedConfig": Fate.CRASHED,
}
_US_PER_MS = 1e3


def read_search(path: Path) -> StudyOf:
    """Read a file of T4 results or a Kernel Tuner cache, even if Kernel Tuner still writes it.

    Raises:
        RecordError: If the file is neither, an entry lacks what its format demands, or there is no
            entry.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise RecordError(f"{path}: cannot be read: {why_unreadable(problem)}") from None
    try:
        data = _parsed(text)
        found = None
        if isinstance(data, dict) and "results" in data:
            found = _t4(path, data)
        elif isinstance(data, dict) and "cache" in data:
            found = _cache(data)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
        raise RecordError(f"{path}: neither T4 results nor a Kernel Tuner cache: "
                          f"{type(problem).__name__}: {problem}\n"
                          "  next: name a file of JSON that one of these tuners wrote") from None
    if found is None:
        raise RecordError(f"{path}: neither T4 results nor a Kernel Tuner cache\n"
                          "  expected: an object with 'results' or 'cache'")
    if not found.search.trials:
        raise RecordError(f"{path}: holds no result of any config")
    return found


def _parsed(text: str) -> Any:
    """Parse JSON; of a cache that Kernel Tuner has not closed, parse the entries so far."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text.rstrip().rstrip(",") + "}}")


def _t4(path: Path, data: Mapping[str, Any]) -> StudyOf:
    name = path.name.removesuffix(".json").removesuffix(".t4")
    records = []
    for result in data["results"]:
        fate = _FATES[result["invalidity"]]
        wanted = (result.get("objectives") or ["time"])[0]
        found = [m["value"] for m in result.get("measurements", ()) if m["name"] == wanted]
        runtimes = result["times"].get("runtimes", ())
        value = found[0] if found and not isinstance(found[0], str | list) else None
        records.append(_record(name, result["configuration"], fate, value, runtimes,
                               result.get("timestamp", "")))
    return StudyOf(name, {"file": path.name, "format": "T4"}, Search(tuple(records)))


def _cache(data: Mapping[str, Any]) -> StudyOf:
    kernel = str(data["kernel_name"])
    keys = list(data["tune_params_keys"])
    objective = data.get("objective", "time")
    records = []
    for entry in data["cache"].values():
        value = entry[objective]
        fate = _ERRORS.get(value, Fate.CRASHED) if isinstance(value, str) else Fate.VERIFIED
        records.append(_record(
            kernel, {name: entry[name] for name in keys}, fate,
            value if fate is Fate.VERIFIED else None, entry.get("times", ()),
            entry.get("timestamp", ""),
        ))
    facts = {"device": str(data["device_name"]), "problem": str(data["problem_size"]),
             "format": "Kernel Tuner cache"}
    return StudyOf(f"{kernel} {facts['problem']} {facts['device']}", facts, Search(tuple(records)))


def _record(
    kernel: str, values: Mapping[str, Any], fate: Fate, ms: float | None, runtimes: Any, when: str
) -> Record:
    own = {name: value for name, value in values.items() if name != VARIANT and value != ABSENT}
    for name, value in own.items():
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"parameter '{name}' is {value!r}, not a number, bool or text")
    timing = None
    if ms is not None:
        samples = sorted(float(t) * _US_PER_MS for t in runtimes) or [ms * _US_PER_MS]
        quarter = len(samples) // 4
        timing = Timing(ms * _US_PER_MS, samples[quarter], samples[-1 - quarter], len(samples),
                        "as the file says")
    return Record(
        key="", operator=kernel, pass_name="", problem="", gpu="",
        config=Config.of(str(values.get(VARIANT, kernel)), own), fate=fate, timing=timing,
        when=str(when),
    )
