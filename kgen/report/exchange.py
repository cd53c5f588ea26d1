"""Searches in the formats of other tuners: T4 results and Kernel Tuner's cache files.

Both formats have one list of parameters for all configs of a search. The variant is therefore a
parameter, and a parameter that a variant lacks has the value `-`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kgen.model.config import Value
from kgen.model.record import Fate, Record
from kgen.report.searches import Search
from kgen.report.storage import write_whole
from kgen.report.tables import ReportRow

T4_VERSION = "1.0.0"
CACHE_VERSION = "1.0.0"
VARIANT = "variant"
ABSENT = "-"

# Fate -> `invalidity` of T4.
_INVALIDITY: Mapping[Fate, str] = {
    Fate.VERIFIED: "correct",
    Fate.REJECTED: "constraints",
    Fate.BUILD_FAILED: "compile",
    Fate.WRONG: "correctness",
    Fate.TIMED_OUT: "timeout",
    Fate.CRASHED: "runtime",
}
# Fate -> the text that Kernel Tuner writes in place of a time.
_ERRORS: Mapping[Fate, str] = {
    Fate.VERIFIED: "RuntimeFailedConfig",  # verified, but never timed
    Fate.REJECTED: "InvalidConfig",
    Fate.BUILD_FAILED: "CompilationFailedConfig",
    Fate.WRONG: "RuntimeFailedConfig",
    Fate.TIMED_OUT: "RuntimeFailedConfig",
    Fate.CRASHED: "RuntimeFailedConfig",
}


def write_exchange(folder: Path, row: ReportRow, search: Search, device: str) -> list[Path]:
    """Write a search as `NAME.t4.json` and `NAME.cache.json`; return the files.

    Raises:
        StorageError: If a file cannot be written.
    """
    words = f"{row.operator} {row.report.pass_name} {row.label} {row.gpu}"
    stem = re.sub(r"[^\w.+-]+", "_", words)
    files = {
        folder / f"{stem}.t4.json": t4_results(search),
        folder / f"{stem}.cache.json": kernel_tuner_cache(row, search, device),
    }
    for file, data in files.items():
        write_whole(file, json.dumps(data, indent=1) + "\n")
    return list(files)


def t4_results(search: Search) -> dict[str, Any]:
    """A search in the T4 results format; times in milliseconds."""
    parameters = _parameters(search)
    return {
        "schema_version": T4_VERSION,
        "results": [_t4_result(record, parameters) for record in search.trials],
    }


def _t4_result(record: Record, parameters: Mapping[str, object]) -> dict[str, Any]:
    timing = record.timing
    return {
        "timestamp": record.when,
        "configuration": _values(record, parameters),
        "objectives": ["time"],
        "times": {"compilation_time": 0.0, "framework": 0.0, "search_algorithm": 0.0,
                  "validation": 0.0, "runtimes": _runtimes(record)},
        "invalidity": _INVALIDITY[record.fate],
        "correctness": float(record.fate is Fate.VERIFIED),
        "measurements": []
        if timing is None
        else [{"name": "time", "value": timing.median_us / 1e3, "unit": "ms"}],
    }


def kernel_tuner_cache(row: ReportRow, search: Search, device: str) -> dict[str, Any]:
    """A search as Kernel Tuner's cache file, for its dashboards and simulated runs.

    Args:
        row: The problem.
        search: Trials of the problem; if a config was tried twice, its last trial counts.
        device: Name of the device.
    """
    parameters = _parameters(search)
    cache = {}
    for record in search.trials:
        values = _values(record, parameters)
        timed = record.timing is not None and record.fate is Fate.VERIFIED
        cache[",".join(str(value) for value in values.values())] = {
            **values,
            "time": record.timing.median_us / 1e3
            if timed and record.timing
            else _ERRORS[record.fate],
            "times": _runtimes(record),
            "compile_time": 0.0,
            "verification_time": 0.0,
            "benchmark_time": 0.0,
            "strategy_time": 0.0,
            "framework_time": 0.0,
            "timestamp": record.when,
        }
    return {
        "schema_version": CACHE_VERSION,
        "device_name": device,
        "kernel_name": f"{row.operator}_{row.report.pass_name}",
        "problem_size": row.report.problem,
        "tune_params_keys": list(parameters),
        "tune_params": {name: list(values) for name, values in parameters.items()},
        "objective": "time",
        "cache": cache,
    }


def _parameters(search: Search) -> dict[str, list[Value]]:
    """The values of each parameter, `-` included, in the order of their first use."""
    names: dict[str, None] = {}
    for record in search.trials:
        names.update(dict.fromkeys(name for name, _ in record.config.values))
    found: dict[str, list[Value]] = {name: [] for name in (VARIANT, *names)}
    for record in search.trials:
        for name, value in _values(record, found).items():
            if not any(type(v) is type(value) and v == value for v in found[name]):
                found[name].append(value)
    return found


def _values(record: Record, parameters: Mapping[str, object]) -> dict[str, Value]:
    own: dict[str, Value] = {VARIANT: record.config.variant, **record.config.as_dict()}
    return {name: own.get(name, ABSENT) for name in parameters}


def _runtimes(record: Record) -> list[float]:
    """Quartiles and median in milliseconds, because the journal keeps no samples."""
    timing = record.timing
    if timing is None:
        return []
    return [us / 1e3 for us in (timing.low_us, timing.median_us, timing.high_us)]
