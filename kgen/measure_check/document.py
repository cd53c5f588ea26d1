"""Write results as YAML, to compare machines or days."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from kgen.errors import StorageError
from kgen.measure.stats import Interval
from kgen.measure_check.bars import judge_bars
from kgen.measure_check.model import ProblemQuality, Quality

SCHEMA = 1


def check_file_writable(path: Path) -> None:
    """Check before the measurements that the file can be written afterwards.

    Raises:
        StorageError: If the file cannot be written.
    """
    folder = path.parent
    if not folder.is_dir() or path.is_dir() or not os.access(folder, os.W_OK):
        raise StorageError(
            f"{path}: cannot be written: {folder} must be a folder that you may write to, and the "
            "name that of a file\n  choose another --yaml FILE"
        )


def write_quality(path: Path, quality: Quality) -> None:
    """Write results and bars; shares are fractions, times microseconds.

    Raises:
        StorageError: If it cannot be written.
    """
    data = {
        "schema": SCHEMA,
        **{key: getattr(quality, key) for key in ("operator", "gpu", "l2", "tunes", "runs")},
        "environment": dict(quality.environment),
        "verdicts": [{**asdict(v), "kept": v.kept} for v in judge_bars(quality)],
        "problems": [_problem(p) for p in quality.problems],
    }
    text = yaml.safe_dump(_plain(data), sort_keys=False, width=100, allow_unicode=True)
    try:
        path.write_text("# Written by kgen measure-check; docs/measurement.md.\n" + text, "utf-8")
    except OSError as problem:
        raise StorageError(
            f"{path}: cannot be written: {problem.strerror}\n  choose another --yaml FILE"
        ) from None


def _problem(found: ProblemQuality) -> dict[str, Any]:
    same = found.same
    return {
        "pass": found.pass_name,
        "problem": found.problem,
        "same_kernel": {
            "config": same.config,
            "difference": same.difference,
            "bias_by_place": same.biases,
            "spread_between_runs": same.spread,
            "runs": [{name: getattr(run, name) for name in run.__slots__} for run in same.runs],
        },
        "flip_rate": found.flip_rate,
        "winners": [
            {
                **{name: getattr(winner, name) for name in winner.__slots__},
                "final_over_trial": winner.final_over_trial,
            }
            for winner in found.winners
        ],
        "library": {name: getattr(found.library, name) for name in found.library.__slots__},
    }


def _plain(value: Any) -> Any:
    """Round to six digits; write infinite ends of an interval as null."""
    if isinstance(value, Interval):
        closed = math.isfinite(value.half_width)
        return {
            "median": _plain(value.median),
            "low": _plain(value.low) if closed else None,
            "high": _plain(value.high) if closed else None,
        }
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
