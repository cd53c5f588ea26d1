"""`FeasibleSampler` in Optuna programs that use nothing else of kgen."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import kgen.search
from kgen.search.sampler import CLAIM, FeasibleSampler

EXAMPLE = Path(__file__).resolve().parents[2] / "benchmarks" / "examples" / "feasible_sampler.py"
CHOICES: dict[str, list[int | str]] = {
    "x": [1, 2, 4, 8, 16], "y": [1, 2, 3], "mode": ["row", "col"],
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def rule(config: dict[str, Any]) -> bool:
    return bool(config["x"] * config["y"] <= 16)


def sampler() -> FeasibleSampler:
    return kgen.search.FeasibleSampler.of(CHOICES, rule, seed=5)


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """In another order than declared, and by other distributions than categorical ones."""
    mode = trial.suggest_categorical("mode", ["col", "row", "neither"])
    x = trial.suggest_int("x", 1, 16)
    return {"x": x, "y": trial.suggest_float("y", 0.0, 4.0), "mode": mode}


def time_of(config: dict[str, Any]) -> float:
    x, y = float(config["x"]), float(config["y"])
    return 1.0 + abs(x - 4) + abs(y - 2) + float(config["mode"] == "col")


def objective(trial: optuna.Trial) -> float:
    config = suggest(trial)
    assert rule(config)
    if config["x"] == 16:
        raise RuntimeError("does not build")
    return time_of(config)


def keys(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [tuple(sorted(trial.params.items())) for trial in study.trials]


@pytest.mark.parametrize("jobs", [1, 4])
def test_optimize_tries_every_feasible_config_once(jobs: int) -> None:
    feasible = sampler()
    study = optuna.create_study(sampler=feasible)
    study.optimize(objective, n_trials=len(feasible), n_jobs=jobs, catch=(RuntimeError,))
    assert len(feasible) == 24
    assert len(set(keys(study))) == 24
    assert study.best_params == {"x": 4, "y": 2.0, "mode": "row"}
    study.optimize(objective, n_trials=1)  # all are tried: the best once more
    assert study.trials[-1].params == study.best_params


def test_ask_and_tell_with_trials_that_run_at_the_same_time() -> None:
    study = optuna.create_study(sampler=sampler())
    running = [study.ask() for _ in range(8)]
    configs = [suggest(trial) for trial in running]
    assert len({tuple(config.items()) for config in configs}) == 8
    for trial, config in zip(reversed(running), reversed(configs), strict=True):
        study.tell(trial, time_of(config))
    more = [suggest(study.ask()) for _ in range(8)]
    assert not {tuple(c.items()) for c in more} & {tuple(c.items()) for c in configs}


def test_threads_that_ask_at_once_get_different_configs() -> None:
    study = optuna.create_study(sampler=sampler())
    begin = threading.Barrier(8)
    found: list[tuple[Any, ...]] = []

    def ask() -> None:
        begin.wait(10)
        found.append(tuple(suggest(study.ask()).items()))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8


def test_a_study_on_disk_goes_on_and_another_process_sees_what_runs(tmp_path: Path) -> None:
    def study() -> optuna.Study:
        storage = JournalStorage(JournalFileBackend(str(tmp_path / "s.log")))
        return optuna.create_study(
            sampler=sampler(), storage=storage, study_name="s", load_if_exists=True
        )

    first = study()
    first.optimize(objective, n_trials=6, catch=(RuntimeError,))
    running = first.ask()
    running.suggest_int("x", 1, 16)  # of all parameters, only this one is suggested yet
    second = study()
    second.optimize(objective, n_trials=17, catch=(RuntimeError,))
    seen = {key for key in keys(second) if len(key) == 3}
    assert len(seen) == 23
    mine = tuple(sorted(suggest(running).items()))
    assert mine not in seen
    whole = optuna.create_study(sampler=sampler())
    whole.optimize(objective, n_trials=6, catch=(RuntimeError,))
    assert keys(whole) == keys(first)[:6]  # same seed, same history


def test_a_failure_after_the_first_suggestion_is_of_the_whole_config() -> None:
    study = optuna.create_study(sampler=sampler())
    trial = study.ask()
    trial.suggest_int("x", 1, 16)
    claim = study._storage.get_trial(trial._trial_id).system_attrs[CLAIM]
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    for _ in range(23):
        other = study.ask()
        assert suggest(other) != claim
        study.tell(other, 1.0)


def test_enqueued_configs_are_tried_and_not_proposed_again() -> None:
    study = optuna.create_study(sampler=sampler())
    wanted = {"x": 8, "y": 1, "mode": "row"}
    study.enqueue_trial(wanted)
    study.optimize(objective, n_trials=24, catch=(RuntimeError,))
    assert study.trials[0].params == wanted
    assert len(set(keys(study))) == 24


def test_configs_with_other_keys_are_conditional_parameters() -> None:
    feasible: list[dict[str, int | str]] = [
        {"method": "tiled", "tile": 8}, {"method": "tiled", "tile": 16}, {"method": "naive"},
    ]

    def conditional(trial: optuna.Trial) -> float:
        if trial.suggest_categorical("method", ["naive", "tiled"]) == "naive":
            return 9.0
        return float(trial.suggest_int("tile", 8, 16, step=8))

    study = optuna.create_study(sampler=FeasibleSampler(feasible, first=[{"method": "naive"}]))
    study.optimize(conditional, n_trials=3)
    assert study.trials[0].params == {"method": "naive"}
    assert sorted(map(str, (trial.params for trial in study.trials))) == sorted(map(str, feasible))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda trial: trial.suggest_int("z", 0, 1), "'z' is not part of the proposed config"),
        (lambda trial: trial.suggest_int("x", 17, 20), "which the objective's"),
        (lambda trial: trial.suggest_categorical("mode", ["a", "b"]), "which the objective's"),
        (lambda trial: trial.suggest_int("mode", 0, 1), "which the objective's"),
    ],
)
def test_an_objective_that_does_not_fit_is_told(wrong: Any, said: str) -> None:
    study = optuna.create_study(sampler=sampler())
    with pytest.raises(ValueError, match=re.escape(said)):
        wrong(study.ask())


def test_what_is_no_time_is_refused() -> None:
    study = optuna.create_study(sampler=sampler())
    trial = study.ask()
    suggest(trial)
    study.tell(trial, -1.0)
    with pytest.raises(ValueError, match=r"trial 0 has the value -1\.0"):
        suggest(study.ask())
    with pytest.raises(ValueError, match=r"directions are \['MAXIMIZE'\]"):
        suggest(optuna.create_study(sampler=sampler(), direction="maximize").ask())
    with pytest.raises(ValueError, match="the rule allows none of the 30 combinations"):
        FeasibleSampler.of(CHOICES, lambda config: False)


def test_the_example_runs_and_resumes(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--storage", str(tmp_path / "s.log"), "--jobs", "2"]
    printed = [
        subprocess.run(
            [*command, "--trials", trials], capture_output=True, text=True, check=True
        ).stdout
        for trials in ("6", "5")
    ]
    assert [re.findall(r"(\d+) of \d+ configs tried", text) for text in printed] == [["6"], ["11"]]
    assert "best: {'block_" in printed[1]
