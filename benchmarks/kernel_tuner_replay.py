"""Kernel Tuner's search strategies, replayed over a recorded space by its simulation mode.

Needs the package `kernel_tuner`, which kgen itself does not need: `pip install 'kgen[benchmark]'`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import random
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The strategies that were the best on at least one recorded space of decision 0004.
STRATEGIES = (
    "adaptive_tabu_greywolf",
    "hybrid_vndx",
    "genetic_algorithm",
    "diff_evo",
    "greedy_ils",
    "simulated_annealing",
)


def missing(strategy: str = "") -> str | None:
    """Why Kernel Tuner or a strategy of it cannot be used, with the next step; None if it can."""
    try:
        from kernel_tuner.interface import strategy_map
    except ImportError as error:
        return (
            f"Kernel Tuner cannot be imported ({error})\n"
            "  next: pip install 'kgen[benchmark]', or leave the methods kt out"
        )
    if strategy and strategy not in strategy_map:
        return f"Kernel Tuner has no strategy {strategy!r}; known: {', '.join(strategy_map)}"
    return None


def replay(path: str, strategy: str, seed: int, evaluations: int) -> NDArray[np.float64]:
    """Run a strategy until it has evaluated enough distinct configs, or ends by itself.

    Args:
        path: A Kernel Tuner cache file, gzipped or not.
        strategy: Kernel Tuner's name of the strategy, which has its default options.
        seed: The seed of Python's, numpy's and Kernel Tuner's random numbers.
        evaluations: Largest number of distinct configs.
    Returns:
        The recorded time of each distinct config in the order of evaluation; NaN where it failed.
    """
    import kernel_tuner

    text, recorded = _read(path)
    names = recorded["tune_params_keys"]
    valid = recorded["cache"]

    def is_recorded(*args: Any) -> bool:
        values = [args[0][name] for name in names] if isinstance(args[0], dict) else args
        return ",".join(map(str, values)) in valid

    random.seed(seed)
    np.random.seed(seed)  # some strategies use numpy's global generator
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        plain = Path(folder) / "cache.json"
        plain.write_text(text)
        results, _ = kernel_tuner.tune_kernel(
            recorded["kernel_name"],
            "",  # no source: nothing is compiled
            recorded["problem_size"],
            [],
            {name: recorded["tune_params"][name] for name in names},
            restrictions=is_recorded,
            strategy=strategy,
            strategy_options={"max_fevals": evaluations},
            cache=str(plain),
            simulation_mode=True,
            lang="CUDA",
            quiet=True,
            seed=seed,
        )
    order = dict.fromkeys(",".join(str(result[name]) for name in names) for result in results)
    times = [valid[key]["time"] for key in order if key in valid]
    return np.array(
        [t if isinstance(t, (int, float)) and math.isfinite(t) else math.nan for t in times]
    )[:evaluations]


@cache
def _read(path: str) -> tuple[str, dict[str, Any]]:
    """A cache file in the form that Kernel Tuner accepts as complete, and its content."""
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt") as file:
        recorded: dict[str, Any] = json.load(file)
    measured = recorded.pop("cache")  # must be the last key
    recorded["cache"] = measured
    return json.dumps(recorded, indent=""), recorded
