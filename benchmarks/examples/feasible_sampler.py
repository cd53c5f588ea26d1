"""kgen's search in an Optuna program of your own: the tile sizes of a blocked matrix product.

    python benchmarks/examples/feasible_sampler.py [--trials 40] [--storage FILE] [--jobs 2]

Times numpy's product of two float32 matrices block by block. Needs kgen (or its folder on the
path), Optuna and numpy; no GPU. With `--storage` an existing study is continued.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kgen.search

SIZE = 128
CHOICES = {"block_m": [8, 16, 32, 64, 128], "block_n": [8, 16, 32, 64, 128], "block_k": [32, 128]}
CACHE_BYTES = 64 * 1024


def fits(config: dict[str, bool | int | float | str]) -> bool:
    """Whether the three blocks of a config fit the cache."""
    m, n, k = (int(config[name]) for name in ("block_m", "block_n", "block_k"))
    return 4 * (m * k + k * n + m * n) <= CACHE_BYTES


def objective(trial: optuna.Trial) -> float:
    """Median time of the product over three runs, in milliseconds."""
    block_m = trial.suggest_categorical("block_m", CHOICES["block_m"])
    block_n = trial.suggest_int("block_n", 8, 128)  # any range that includes the feasible values
    block_k = trial.suggest_categorical("block_k", CHOICES["block_k"])
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIZE, SIZE), dtype=np.float32) for _ in range(2))
    times_ms = []
    for _ in range(3):
        began = time.perf_counter()
        product = np.zeros((SIZE, SIZE), dtype=np.float32)
        for m in range(0, SIZE, block_m):
            for n in range(0, SIZE, block_n):
                for k in range(0, SIZE, block_k):
                    product[m : m + block_m, n : n + block_n] += (
                        a[m : m + block_m, k : k + block_k] @ b[k : k + block_k, n : n + block_n]
                    )
        times_ms.append((time.perf_counter() - began) * 1e3)
    if not np.allclose(product, a @ b, atol=1e-3):
        raise ValueError("the blocked product is wrong")  # makes a failed trial: see `catch`
    return statistics.median(times_ms)


def main() -> None:
    """Search, and print the best config."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--storage", type=Path, help="a journal file of Optuna's")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    storage = JournalStorage(JournalFileBackend(str(options.storage))) if options.storage else None
    sampler = kgen.search.FeasibleSampler.of(CHOICES, fits)
    study = optuna.create_study(
        sampler=sampler, storage=storage, study_name="blocks", load_if_exists=True
    )
    wanted = min(options.trials, len(sampler) - len(study.trials))
    if wanted > 0:
        study.optimize(objective, n_trials=wanted, n_jobs=options.jobs, catch=(ValueError,))
    best = study.best_trial
    print(f"{len(study.trials)} of {len(sampler)} configs tried")
    print(f"best: {best.params}, {best.value:.4f} ms")


if __name__ == "__main__":
    main()
