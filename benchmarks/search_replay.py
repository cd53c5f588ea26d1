"""Replay searches over recorded, exhaustively measured spaces; no GPU needed.

    python benchmarks/search_replay.py --spaces DIR [--methods random,tpe,kgen,kt] [--seeds 20]

DIR holds Kernel Tuner caches (`*.json.gz`). For every space, method and batch size it reports the
mean over seeds of (best time so far) / (optimum) after given numbers of distinct evaluations, and
the mean time in milliseconds to propose one config. Each mean is followed by its standard error
over the seeds. Configs that failed in the record count as evaluations. `tpe` is Optuna's TPESampler
on categorical parameters; its infeasible and repeated proposals are rejected and do not count. `kt`
stands for six strategies of Kernel Tuner and `kt:NAME` for one of them. These strategies need
`pip install 'kgen[benchmark]'`, and propose one config at a time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

# Each process runs one replay; threads of BLAS would only compete with the other processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernel_tuner_replay
from kgen.model.config import Config, Value
from kgen.search.encoding import Encoding
from kgen.search.proposer import Proposer

Times = NDArray[np.float64]
TPE_DRAWS = 50  # rejected draws after which a random feasible config is taken


@dataclass(frozen=True)
class Space:
    """A recorded space: every feasible config with its time (any unit), NaN where it failed."""

    path: str
    encoding: Encoding
    times: Times

    @property
    def optimum(self) -> float:
        """Return the best recorded time."""
        return float(np.nanmin(self.times))


@cache
def load_space(path: str) -> Space:
    """Read a Kernel Tuner cache file, gzipped or not."""
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt") as file:
        recorded = json.load(file)
    names = list(recorded["tune_params"])
    time_of: dict[Config, float] = {}
    for entry in recorded["cache"].values():
        values: dict[str, Value] = {name: entry[name] for name in names}
        measured = entry["time"]
        ok = isinstance(measured, (int, float)) and math.isfinite(measured)
        time_of[Config("recorded", tuple(values.items()))] = measured if ok else math.nan
    encoding = Encoding(time_of)
    return Space(path, encoding, np.array([time_of[config] for config in encoding.configs]))


def replay_random(space: Space, seed: int, evaluations: int, batch: int) -> Times:
    """Try a random permutation."""
    order = np.random.default_rng(seed).permutation(len(space.times))
    return space.times[order[:evaluations]]


def replay_kgen(space: Space, seed: int, evaluations: int, batch: int) -> Times:
    """Try the configs that kgen's proposer proposes."""
    proposer = Proposer(space.encoding, seed)
    seen: list[float] = []
    while len(seen) < evaluations:
        picks = proposer.propose(min(batch, evaluations - len(seen)))
        if not picks:
            break
        for i in picks:
            found = float(space.times[i])
            proposer.tell(i, None if math.isnan(found) else found)
            seen.append(found)
    return np.array(seen)


def replay_tpe(space: Space, seed: int, evaluations: int, batch: int) -> Times:
    """Try the configs that Optuna's TPE proposes, feasible and new configs only.

    The sampler is called directly until it proposes a feasible, new config. With `study.ask` every
    rejected draw would remain in the study as a failed trial. TPE ignores failed trials, but they
    make each `ask` slower: one replay of the GEMM space took 260 s that way.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    states = optuna.trial.TrialState
    storage = optuna.storages.InMemoryStorage()
    columns = space.encoding.columns
    choices = dict(zip(columns, space.encoding.choices, strict=True))
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(values)
        for name, values in choices.items()
        if len(values) > 1
    }
    fixed = {name: values[0] for name, values in choices.items() if len(values) == 1}
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(storage=storage, sampler=sampler)
    rng = np.random.default_rng(seed)
    order: dict[int, None] = {}  # configs in the order of their proposal
    while len(order) < min(evaluations, len(space.times)):
        running: list[tuple[int, int]] = []
        while len(running) < batch and len(order) < min(evaluations, len(space.times)):
            trial = study.ask()
            template = storage.get_trial(trial._trial_id)
            pick: int | None = None
            for _ in range(TPE_DRAWS):
                drawn = sampler.sample_relative(study, template, distributions)
                if not drawn:
                    break  # still in TPE's random start-up
                params = {**fixed, **drawn}
                values = tuple((name, params[name]) for name in columns)
                pick = space.encoding.index(Config("recorded", values))
                if pick is not None and pick not in order:
                    break
                pick = None
            while pick is None or pick in order:
                pick = int(rng.integers(len(space.times)))
            order[pick] = None
            chosen = space.encoding.configs[pick].as_dict()
            for name, distribution in distributions.items():
                internal = distribution.to_internal_repr(chosen[name])
                storage.set_trial_param(trial._trial_id, name, internal, distribution)
            running.append((trial.number, pick))
        for number, pick in running:
            found = float(space.times[pick])
            if math.isnan(found):
                study.tell(number, state=states.FAIL)
            else:
                study.tell(number, found)
    return space.times[list(order)]


def replay_kernel_tuner(
    strategy: str, space: Space, seed: int, evaluations: int, batch: int
) -> Times:
    """Try the configs that a strategy of Kernel Tuner proposes; `batch` has no effect."""
    return kernel_tuner_replay.replay(space.path, strategy, seed, evaluations)


METHODS: dict[str, Callable[[Space, int, int, int], Times]] = {
    "random": replay_random,
    "tpe": replay_tpe,
    "kgen": replay_kgen,
}
KERNEL_TUNER = "kt"


def methods_of(text: str) -> Iterator[str]:
    """Yield the methods of a comma-separated list; `kt` is replaced by its strategies."""
    for name in text.split(","):
        kind, _, strategy = name.partition(":")
        if kind == KERNEL_TUNER:
            if missing := kernel_tuner_replay.missing(strategy):
                raise SystemExit(f"--methods {name}: {missing}")
            chosen = [strategy] if strategy else kernel_tuner_replay.STRATEGIES
            yield from (f"{KERNEL_TUNER}:{each}" for each in chosen)
        elif name in METHODS:
            yield name
        else:
            known = ", ".join([*METHODS, KERNEL_TUNER, f"{KERNEL_TUNER}:STRATEGY"])
            raise SystemExit(f"--methods: unknown method {name!r}; known: {known}")


def is_sequential(method: str) -> bool:
    """Whether a method proposes one config at a time, so that batches have no effect."""
    return method == "random" or method.startswith(KERNEL_TUNER)


@dataclass(frozen=True)
class Job:
    """One search to replay."""

    space: str
    method: str
    batch: int
    seed: int
    evaluations: int


def run(job: Job) -> tuple[Job, Times, float]:
    """Replay one job; return best-so-far over optimum per evaluation, and ms per proposal."""
    space = load_space(job.space)
    began = time.perf_counter()
    replay = METHODS.get(job.method) or partial(
        replay_kernel_tuner, job.method.removeprefix(f"{KERNEL_TUNER}:")
    )
    times = replay(space, job.seed, job.evaluations, job.batch)
    took_ms = (time.perf_counter() - began) * 1e3 / max(1, len(times))
    best = np.minimum.accumulate(np.where(np.isnan(times), np.inf, times))
    return job, best / space.optimum, took_ms


def jobs_of(options: argparse.Namespace) -> Iterator[Job]:
    """Yield every search that the options select."""
    paths = sorted(Path(options.spaces).glob("*.json*"))
    if not paths:
        raise SystemExit(f"{options.spaces}: no *.json or *.json.gz file in it")
    for path in paths:
        for method in methods_of(options.methods):
            batches = [1] if is_sequential(method) else map(int, options.batch.split(","))
            for batch in batches:
                for seed in range(options.seeds):
                    yield Job(str(path), method, batch, seed, max(options.at))


def report(done: list[tuple[Job, Times, float]], at: list[int]) -> Iterator[str]:
    """Yield the lines of the YAML report."""
    rows: dict[str, dict[str, list[tuple[Times, float]]]] = {}
    for job, ratios, took_ms in done:
        name = job.method if is_sequential(job.method) else f"{job.method}_batch{job.batch}"
        space = Path(job.space).name.split(".json")[0]
        rows.setdefault(space, {}).setdefault(name, []).append((ratios, took_ms))
    yield f"# best found / optimum after {at} distinct evaluations: mean over seeds, its error"
    yield f"evaluations: [{', '.join(map(str, at))}]"
    yield "spaces:"
    logs: dict[str, list[list[float]]] = {}
    for space, methods in rows.items():
        yield f"  {space}:"
        for name, runs in methods.items():
            means = [_mean_at(runs, k) for k in at]
            logs.setdefault(name, []).append([math.log(m) for m in means])
            cost = sum(took_ms for _, took_ms in runs) / len(runs)
            listed = ", ".join(f"{m:.3f}" for m in means)
            errors = ", ".join(f"{_error_at(runs, k):.3f}" for k in at)
            yield (
                f"    {name}: {{ratio: [{listed}], error: [{errors}], "
                f"seeds: {len(runs)}, ms_each: {cost:.2f}}}"
            )
    yield "geometric_mean:"
    for name, table in logs.items():
        listed = ", ".join(f"{m:.3f}" for m in np.exp(np.mean(table, axis=0)))
        yield f"  {name}: [{listed}]"


def _mean_at(runs: list[tuple[Times, float]], k: int) -> float:
    return float(np.mean(_ratios_at(runs, k)))


def _error_at(runs: list[tuple[Times, float]], k: int) -> float:
    """The standard error of the mean."""
    ratios = _ratios_at(runs, k)
    return float(np.std(ratios, ddof=1) / math.sqrt(len(ratios))) if len(ratios) > 1 else math.nan


def _ratios_at(runs: list[tuple[Times, float]], k: int) -> list[float]:
    return [float(ratios[min(k, len(ratios)) - 1]) for ratios, _ in runs]


def main() -> None:
    """Parse the options, replay, print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--spaces", required=True, help="folder of Kernel Tuner caches")
    parser.add_argument(
        "--methods", default="random,tpe,kgen", help="random, tpe, kgen, kt, kt:NAME"
    )
    parser.add_argument("--batch", default="1,16", help="batch sizes, comma separated")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--at", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="write the report here too")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as pool:
        done = list(pool.map(run, jobs_of(options)))
    text = "\n".join(report(done, options.at)) + "\n"
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
