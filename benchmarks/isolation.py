"""The cost of isolation: trials in a worker process compared with the same trials in this process.

It also measures how long it takes to replace a killed worker.

    python benchmarks/isolation.py [--gpu auto] [--problem M=..,N=..,dtype=..] [--configs 60]

Both sides run the same trials (load, verify, measure) of the same built configs, in turn.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue
from kgen.launch.select import select_gpu
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.search.feasible import enumerate_feasible
from kgen.trial import WorkerHandle
from kgen.worker import Candidate, Setup, Trial, TrialOutcome
from kgen.worker.runner import Runner

ROUNDS = 5
KILLS = 5


def trials_of(problem_text: str, gpu_name: str, configs: int) -> tuple[Setup, list[Trial]]:
    """Build configs evenly spread over the feasible set, as trials."""
    gpu, ordinal = select_gpu(gpu_name)
    entry = open_catalogue().entry("rmsnorm")
    signature = entry.operator.signature
    problem = parse_problem(problem_text, signature)
    variants = {v.name: v for v in entry.space.of_pass("forward")}
    pass_ = signature.pass_named("forward")
    feasible = enumerate_feasible(tuple(variants.values()), pass_, problem, gpu).configs
    chosen = [feasible[i * len(feasible) // configs] for i in range(min(configs, len(feasible)))]
    renderer = Renderer(include_dir())
    compiler = open_compiler("host" if gpu.is_host else "nvrtc", [include_dir()])
    built = compiler.build(
        [
            BuildRequest(
                renderer.render("rmsnorm", entry.templates, variants[c.variant], c, problem),
                gpu.arch,
            )
            for c in chosen
        ]
    )
    compiler.close()
    trials = [
        Trial("forward", problem, Candidate(variants[c.variant], c, a))
        for c, a in zip(chosen, built, strict=True)
        if isinstance(a, Artifact)
    ]
    return Setup("rmsnorm", (), gpu, ordinal, 0), trials


def seconds_of(
    run: Callable[[Trial], TrialOutcome], trials: list[Trial]
) -> tuple[float, list[Trial]]:
    """Run all trials; return the time, and those that were verified."""
    started = time.perf_counter()
    good = [trial for trial in trials if run(trial).fate is Fate.VERIFIED]
    return time.perf_counter() - started, good


def main() -> int:
    """Print seconds per trial on both sides, and the times of replacement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--problem", action="append")
    parser.add_argument("--configs", type=int, default=60)
    options = parser.parse_args()
    for text in options.problem or ["M=8192,N=4096,dtype=bf16"]:
        setup, trials = trials_of(text, options.gpu, options.configs)
        runner = Runner(open_catalogue().operator("rmsnorm"), setup)
        with WorkerHandle(setup) as worker:
            # A warm-up that also drops the trials that crash, which must not run in this process.
            _, trials = seconds_of(worker.trial, trials)
            seconds_of(runner.trial, trials)
            sides: dict[str, list[float]] = {"in process": [], "worker": []}
            for _ in range(ROUNDS):
                sides["in process"].append(seconds_of(runner.trial, trials)[0])
                sides["worker"].append(seconds_of(worker.trial, trials)[0])
        own, isolated = (statistics.median(sides[name]) for name in ("in process", "worker"))
        ratios = [w / o for w, o in zip(sides["worker"], sides["in process"], strict=True)]
        print(
            f"{text}: {len(trials)} trials; in process {1e3 * own / len(trials):.2f} ms each, in a "
            f"worker {1e3 * isolated / len(trials):.2f} ms: isolation costs "
            f"{100 * (statistics.median(ratios) - 1):+.1f} % "
            f"({100 * (min(ratios) - 1):+.1f} to {100 * (max(ratios) - 1):+.1f} %)"
        )
        sys.stdout.flush()
    with WorkerHandle(setup) as worker:
        waits = []
        for _ in range(KILLS):
            worker.trial(trials[0])
            assert worker._child is not None
            assert worker._child.pid is not None
            time.sleep(5.0)  # by then the spare worker has loaded, as during most of a tune
            os.kill(worker._child.pid, signal.SIGKILL)
            started = time.perf_counter()
            assert worker.trial(trials[0]).fate is Fate.CRASHED
            assert worker.trial(trials[0]).fate is Fate.VERIFIED
            waits.append(time.perf_counter() - started)
        print(
            "a killed worker: the next verified trial after "
            + ", ".join(f"{wait:.2f}" for wait in waits)
            + " s; of that the new worker's start "
            + ", ".join(f"{wait:.2f}" for wait in worker.replacement_s)
            + " s"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
