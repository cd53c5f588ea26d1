"""The trials that records of other problems save on a new problem, replayed over the journals.

    python benchmarks/warm_start_replay.py [--journals generated/kgen_ops] [--gpu h200] [--seeds 2]

Each searched problem is left out in turn. The configs that the journal has times for are then
searched in batches of 8. The report has the number of trials until the first config within 2 % of
the best:

    cold      the search space's own first configs, then the model
    winners   first the winners of all other problems, then as `cold`
    nearest   first the winners of the nearest problems only, then as `cold`: what a tune does
    prior     as `nearest`; the other problems' times are also the prior of the model

The journals hold the configs that earlier searches tried, mostly good ones, and the first configs
of the spaces were chosen from such results. A cold start therefore looks better here than it is on
a new space.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kgen.catalogue import open_catalogue
from kgen.journal import Journal
from kgen.model.config import Config
from kgen.model.record import Fate, Record
from kgen.model.space import Variant
from kgen.search.encoding import Encoding
from kgen.search.proposer import Proposer
from kgen.tune.recorded_winners import distance, recorded_winners
from kgen.tune.warm_start import warm_start

MODES = ("cold", "winners", "nearest", "prior")
LEAST = 40  # least number of timed configs of a problem that is searched again
BATCH = 8
NEAR = 1.02  # times the best time

Times = dict[Config, float]  # time of each config; NaN for a config that failed


def replay(
    problem: str, problems: dict[str, Times], records: Sequence[Record],
    variants: Sequence[Variant], mode: str, seed: int,
) -> int:  # fmt: skip
    """Return the trials until a config is within 2 % of the problem's best."""
    own = problems[problem]
    encoding = Encoding(own)
    others = sorted((p for p in problems if p != problem), key=lambda p: (distance(p, problem), p))
    likely: list[Config] = []
    if mode == "winners":
        likely = [min(timed(problems[p]).items(), key=lambda item: item[1])[0] for p in others]
    elif mode != "cold":
        likely = recorded_winners(records, records[0].pass_name, problem)
    prior = prior_of(problem, others, problems) if mode == "prior" else {}
    first = warm_start(variants, set(own), likely).configs
    places = {config: i for i, config in enumerate(encoding.configs)}
    proposer = Proposer(
        encoding, seed, [places[c] for c in first],
        {places[c]: us for c, us in prior.items() if c in places},
    )  # fmt: skip
    best = min(timed(own).values())
    count = 0
    while picks := proposer.propose(BATCH):
        for i in picks:
            count += 1
            us = own[encoding.configs[i]]
            proposer.tell(i, None if math.isnan(us) else us)
            if us <= NEAR * best:
                return count
    raise AssertionError("the best config was never proposed")


def prior_of(problem: str, others: Sequence[str], problems: dict[str, Times]) -> Times:
    """Expected time over best time: geometric mean over other problems, weighted by nearness."""
    found: dict[Config, list[tuple[float, float]]] = defaultdict(list)
    for other in others:
        weight = 0.5 ** (distance(other, problem) / 4)
        best = min(timed(problems[other]).values())
        for config, us in timed(problems[other]).items():
            found[config].append((weight, math.log(us / best)))
    return {
        config: math.exp(sum(w * v for w, v in pairs) / sum(w for w, _ in pairs))
        for config, pairs in found.items()
    }


def timed(times: Times) -> Times:
    """The configs that did not fail."""
    return {config: us for config, us in times.items() if not math.isnan(us)}


def main() -> None:
    """Replay every problem in every mode; print the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--journals", type=Path, default=Path("generated/kgen_ops"))
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    catalogue = open_catalogue()
    trials: dict[str, list[float]] = {mode: [] for mode in MODES}
    for path in sorted(options.journals.glob(f"*/reports/{options.gpu}.trials.jsonl")):
        every = list(Journal(path).read())
        for pass_name in sorted({record.pass_name for record in every}):
            records = [record for record in every if record.pass_name == pass_name]
            problems: dict[str, Times] = defaultdict(dict)
            for record in records:
                good = record.fate is Fate.VERIFIED and record.timing is not None
                us = record.timing.median_us if good and record.timing else math.nan
                problems[record.problem][record.config] = us
            problems = {p: t for p, t in problems.items() if len(timed(t)) >= LEAST}
            variants = catalogue.entry(records[0].operator).space.of_pass(pass_name)
            for problem in problems if len(problems) > 1 else ():
                for mode in MODES:
                    counts = [
                        replay(problem, problems, records, variants, mode, seed)
                        for seed in range(options.seeds)
                    ]
                    trials[mode].append(float(np.mean(counts)))
    if not trials["cold"]:
        raise SystemExit(f"{options.journals}: no journal of {options.gpu} with two such problems")
    print(f"# trials until within 2 % of the best; {len(trials['cold'])} problems")
    for mode in MODES:
        trial_counts = np.array(trials[mode])
        change = trial_counts - np.array(trials["cold"])
        error = change.std(ddof=1) / math.sqrt(len(change))
        print(
            f"{mode}: {{mean: {trial_counts.mean():.1f}, median: {np.median(trial_counts):.1f}, "
            f"p90: {np.quantile(trial_counts, 0.9):.0f}, "
            f"against_cold: {change.mean():+.2f}, error: {error:.2f}}}"
        )


if __name__ == "__main__":
    main()
