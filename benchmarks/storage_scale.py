"""Simulate many workers on one study of a storage; no GPU needed.

    python benchmarks/storage_scale.py --storage URL [--workers 1,8,64] [--evaluations 200]
        [--space FILE.json.gz] [--trial-s 0.5] [--processes 2]

Each worker is a thread with a search of its own, as `kgen worker` has: it asks the study for a
config, waits for the time of a trial, tells the recorded time, and appends a record to the log. The
workers of a process share its connections. Without `--space`, a Kernel Tuner cache, a synthetic
space of 1344 configs is searched.

Printed for each number of workers: proposals a second, all workers together; the share of proposals
that were given up because another worker had the config; and best time found / optimum after the
evaluations. `claimed twice` must be 0: a config with two results.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.search_replay import Space, load_space
from kgen.journal import RecordLog
from kgen.model.config import Config
from kgen.search.encoding import Encoding
from kgen.search.membership import Membership
from kgen.search.storage import open_storage, parse_storage, storage_option
from kgen.search.study import open_study

RECORD_BYTES = 1000  # about the length of a journal's line


@dataclass(frozen=True)
class Job:
    """The workers of one process.

    Attributes:
        url: The storage.
        study: Its study.
        space: Path of a recorded space; empty for the synthetic one.
        workers: Seeds of the workers.
        evaluations: Of all workers together.
        trial_s: Seconds of a trial.
        all_workers: Number of workers of all processes.
    """

    url: str
    study: str
    space: str
    workers: tuple[int, ...]
    evaluations: int
    trial_s: float
    all_workers: int


def synthetic_space() -> Space:
    """A space with interactions, in which a quarter of the configs fails."""
    configs = [
        Config.of("recorded", {"a": a, "b": b, "c": c, "d": d})
        for a in (1, 2, 4, 8, 16, 32, 64) for b in (1, 2, 4, 8) for c in range(12)
        for d in (0, 1, 2, 3)
    ]
    encoding = Encoding(configs)
    times = []
    for config in encoding.configs:
        v = {name: int(value) for name, value in config.values}
        fails = v["a"] * v["b"] > 128 or (v["d"] == 3 and v["c"] > 3)
        time_us = 10.0 + (math.log2(v["a"]) - 4 + v["d"] / 2) ** 2 + abs(v["c"] - v["b"]) + v["d"]
        times.append(math.nan if fails else time_us)
    return Space("synthetic", encoding, np.array(times))


def space_of(path: str) -> Space:
    """The recorded space, or the synthetic one."""
    return load_space(path) if path else synthetic_space()


def run_workers(job: Job) -> None:
    """Run the workers of one process to the end of the study."""
    space = space_of(job.space)
    storage = open_storage(parse_storage(job.url))
    with Membership(storage, {}) as membership:
        threads = [
            threading.Thread(target=_work, args=(job, space, storage, membership, seed))
            for seed in job.workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _work(job: Job, space: Space, storage: object, membership: Membership, seed: int) -> None:
    # A membership of its own would be a heartbeat a worker; a process has one.
    search = open_study(storage, job.study, space.encoding.configs, seed=seed)  # type: ignore[arg-type]
    log = RecordLog(storage, job.study)  # type: ignore[arg-type]
    while proposals := search.ask(1, at_most=job.evaluations, spread=2 * job.all_workers):
        for proposal in proposals:
            time.sleep(job.trial_s)
            i = space.encoding.index(proposal.config)
            assert i is not None
            found = float(space.times[i])
            log.push([f"{seed} {proposal.number} {'x' * RECORD_BYTES}"])
            search.tell(
                proposal.number, None if math.isnan(found) else found,
                "build_failed" if math.isnan(found) else "verified",
            )


def simulate(url: str, path: str, workers: int, evaluations: int, trial_s: float,
             processes: int) -> str:
    """Run one number of workers; returns a row of the table."""
    study = f"scale/{uuid.uuid4().hex[:8]}"
    count = min(processes, workers)
    jobs = [
        Job(url, study, path, tuple(range(i, workers, count)), evaluations, trial_s, workers)
        for i in range(count)
    ]
    open_storage(parse_storage(url))  # makes the tables
    started = time.monotonic()
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        list(pool.map(run_workers, jobs))
    seconds = time.monotonic() - started
    space = space_of(path)
    search = open_study(open_storage(parse_storage(url)), study, space.encoding.configs)
    trials = search.study.get_trials(deepcopy=False)
    given_up = sum(trial.user_attrs.get("fate") == "duplicate" for trial in trials)
    results = search.results()
    twice = sum(n > 1 for n in Counter(config for config, _ in results).values())
    best = min((t for _, t in results if t is not None), default=math.nan)
    return (
        f"{workers:7} {len(results):11} {seconds:7.1f} {len(results) / seconds:11.1f} "
        f"{given_up / max(1, len(trials)):9.1%} {twice:13} {best / space.optimum:14.3f}"
    )


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--storage", help="URL without a password; or KGEN_STORAGE")
    parser.add_argument("--workers", default="1,8,64", help="numbers of workers to compare")
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--space", default="", help="a Kernel Tuner cache file")
    parser.add_argument("--trial-s", type=float, default=0.5, help="seconds of a trial")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    url = storage_option(options.storage)
    if url is None:
        parser.error("no storage: --storage URL, or KGEN_STORAGE")
    print(f"{url}, {options.evaluations} evaluations, trials of {options.trial_s:g} s")
    print("workers evaluations seconds proposals/s duplicates claimed twice best / optimum")
    for workers in map(int, options.workers.split(",")):
        print(simulate(url.text, options.space, workers, options.evaluations, options.trial_s,
                       options.processes), flush=True)


if __name__ == "__main__":
    main()
