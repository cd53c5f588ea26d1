"""Simulate many workers on one study of a storage; no GPU needed.

    python benchmarks/storage_scale.py --storage URL [--workers 1,8,64] [--evaluations 200]
        [--space FILE.json.gz] [--trial-s 0.5] [--processes 2] [--searches 4]

A worker asks the study for a config, waits for the time of a trial, tells the study the recorded
time, and appends a record to the log. A process has `--searches` threads, each with a search and
connections like those of one `kgen worker`. The workers of the process take turns on these threads,
because at any time most workers wait for a trial. At most `--processes` x `--searches` workers
therefore ask at the same moment. `--space` is a Kernel Tuner cache; without it a synthetic space of
1344 configs is searched.

Printed for each number of workers: proposals per second of all workers together; the median time of
a proposal in seconds; the share of proposals that were given up because another worker had the
config; and the best time found / optimum after the evaluations. `claimed twice` counts configs with
two results, and must be 0.
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import statistics
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from optuna.storages import BaseStorage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.search_replay import Space, load_space
from kgen.journal import RecordLog
from kgen.model.config import Config
from kgen.search.encoding import Encoding
from kgen.search.membership import Membership
from kgen.search.share import share_of
from kgen.search.storage import open_storage, parse_storage, storage_option
from kgen.search.study import Proposal, open_study

RECORD_BYTES = 1000  # about the length of a line of the journal


@dataclass(frozen=True)
class Job:
    """The workers of one process.

    Attributes:
        url: The storage.
        study: Name of the study in the storage.
        space: Path of a recorded space; empty for the synthetic space.
        workers: Numbers of the workers; the first `searches` numbers are also seeds of searches.
        evaluations: Number of evaluations of all workers together.
        trial_s: Duration of a trial in seconds.
        all_workers: Number of workers of all processes.
        searches: Number of threads on which the workers take turns.
    """

    url: str
    study: str
    space: str
    workers: tuple[int, ...]
    evaluations: int
    trial_s: float
    all_workers: int
    searches: int


def synthetic_space() -> Space:
    """A space whose parameters interact, and in which a quarter of the configs fails."""
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


class Turns:
    """The workers of a process, ordered by the time at which their trials end."""

    def __init__(self, workers: tuple[int, ...]) -> None:
        self._lock = threading.Lock()
        self._free_at: list[tuple[float, int, Proposal | None]] = [
            (0.0, worker, None) for worker in workers
        ]
        heapq.heapify(self._free_at)

    def take(self) -> tuple[int, Proposal | None] | None:
        """Wait for the next free worker; return it with its proposal, or None if none is left."""
        with self._lock:
            if not self._free_at:
                return None
            at, worker, proposal = heapq.heappop(self._free_at)
        time.sleep(max(0.0, at - time.monotonic()))
        return worker, proposal

    def give(self, worker: int, proposal: Proposal, trial_s: float) -> None:
        """Begin the trial of a worker."""
        with self._lock:
            heapq.heappush(self._free_at, (time.monotonic() + trial_s, worker, proposal))


def run_workers(job: Job) -> list[float]:
    """Run the workers of one process until the study ends; return the seconds of each proposal."""
    space = space_of(job.space)
    storage = open_storage(parse_storage(job.url))
    turns = Turns(job.workers)
    with Membership(storage, {}), ThreadPoolExecutor(job.searches) as threads:
        running = [
            threads.submit(_work, job, space, storage, turns, seed)
            for seed in job.workers[: job.searches]  # another process has other seeds
        ]
        return [seconds for thread in running for seconds in thread.result()]


def _work(job: Job, space: Space, storage: BaseStorage, turns: Turns, seed: int) -> list[float]:
    # No membership per worker: each would need a heartbeat, and a process has only one.
    search = open_study(storage, job.study, space.encoding.configs, seed=seed)
    log = RecordLog(storage, job.study)
    seconds = []
    while (turn := turns.take()) is not None:
        worker, tried = turn
        if tried is not None:
            i = space.encoding.index(tried.config)
            assert i is not None
            found = float(space.times[i])
            failed = math.isnan(found)
            log.push([f"{worker} {tried.number} {'x' * RECORD_BYTES}"])
            search.tell(tried.number, None if failed else found,
                        "build_failed" if failed else "verified")  # fmt: skip
        began = time.monotonic()
        share = share_of(worker, job.all_workers, 2)
        proposals = search.ask(1, at_most=job.evaluations, share=share)
        seconds.append(time.monotonic() - began)
        if proposals:
            turns.give(worker, proposals[0], job.trial_s)
    return seconds


def simulate(url: str, path: str, workers: int, evaluations: int, trial_s: float,
             processes: int, searches: int) -> str:
    """Run the simulation with one number of workers; return a row of the table."""
    study = f"scale/{uuid.uuid4().hex[:8]}"
    count = min(processes, workers)
    jobs = [
        Job(url, study, path, tuple(range(i, workers, count)), evaluations, trial_s, workers,
            searches)
        for i in range(count)
    ]
    open_storage(parse_storage(url))  # creates the tables of the database
    started = time.monotonic()
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        asked_s = [one for each in pool.map(run_workers, jobs) for one in each]
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
        f"{statistics.median(asked_s):10.2f} {given_up / max(1, len(trials)):9.1%} {twice:13} "
        f"{best / space.optimum:14.3f}"
    )


def main() -> None:
    """Parse the options and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--storage", help="URL without a password; or KGEN_STORAGE")
    parser.add_argument("--workers", default="1,8,64", help="numbers of workers to compare")
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--space", default="", help="a Kernel Tuner cache file")
    parser.add_argument("--trial-s", type=float, default=0.5, help="seconds of a trial")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--searches", type=int, default=4, help="threads of a process")
    options = parser.parse_args()
    url = storage_option(options.storage)
    if url is None:
        parser.error("no storage: --storage URL, or KGEN_STORAGE")
    print(f"{url}, {options.evaluations} evaluations, trials of {options.trial_s:g} s")
    print("workers evaluations seconds proposals/s s/proposal duplicates claimed twice "
          "best / optimum")
    for workers in map(int, options.workers.split(",")):
        print(simulate(url.text, options.space, workers, options.evaluations, options.trial_s,
                       options.processes, options.searches), flush=True)


if __name__ == "__main__":
    main()
