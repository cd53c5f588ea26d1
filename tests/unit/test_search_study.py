"""The study on disk: resume, several processes, a space that changes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kgen.errors import RecordError
from kgen.model.config import Config
from kgen.search.params import ParamSpace
from kgen.search.study import Proposal, Search, open_study


def configs(vecs: tuple[int, ...] = (1, 2, 4, 8)) -> list[Config]:
    """Two variants that share `vec` with different choices, and a rule."""
    rows = [
        Config.of("rows", {"vec": vec, "warps": warps, "stream": stream})
        for vec in vecs
        for warps in (1, 2, 4, 8, 16)
        for stream in (False, True)
        if vec * warps <= 64
    ]
    split = [
        Config.of("split", {"vec": vec, "chunk": chunk, "order": order})
        for vec in (2, 4)
        for chunk in (16, 32, 64)
        for order in ("row", "col")
    ]
    return rows + split


def time_us(config: Config) -> float | None:
    values = config.as_dict()
    if values.get("warps") == 16:
        return None
    return 10.0 + abs(int(values["vec"]) - 4) + (3.0 if config.variant == "split" else 0.0)


def finish(search: Search, proposals: list[Proposal]) -> None:
    for proposal in proposals:
        time = time_us(proposal.config)
        search.tell(proposal.number, time, "verified" if time else "build_failed")


def test_import_is_light() -> None:
    code = "import sys, kgen.search, kgen.search.study; print('optuna' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_covers_the_whole_set_once_then_stops(tmp_path: Path) -> None:
    feasible = configs()
    search = open_study(tmp_path / "sub" / "s.log", "p", feasible)
    seen: list[Config] = []
    while batch := search.ask(8):
        seen += [proposal.config for proposal in batch]
        finish(search, batch)
    assert len(seen) == len(set(seen)) == len(feasible)
    assert set(seen) == set(feasible)
    best = search.best()
    assert best is not None
    assert best[1] == 10.0
    assert len(search.results()) == len(feasible)


def test_optuna_sees_names_values_and_fates(tmp_path: Path) -> None:
    import optuna

    search = open_study(tmp_path / "s.log", "p", configs())
    finish(search, search.ask(30))
    study = optuna.load_study(
        study_name="p",
        storage=optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(tmp_path / "s.log"))
        ),
    )
    assert study.metric_names == ["median_us"]
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    for trial in study.trials:
        variant = trial.params["variant"]
        assert all(name == "variant" or name.startswith(f"{variant}.") for name in trial.params)
        verified = trial.state == optuna.trial.TrialState.COMPLETE
        assert trial.user_attrs["fate"] == ("verified" if verified else "build_failed")
    assert study.best_value == 10.0


def test_first_comes_first_and_infeasible_first_is_passed_over(tmp_path: Path) -> None:
    feasible = configs()
    wanted = [feasible[7], Config.of("gone", {"x": 1}), feasible[40]]
    search = open_study(tmp_path / "s.log", "p", feasible, first=wanted)
    assert [p.config for p in search.ask(2)] == [feasible[7], feasible[40]]


def test_resume_knows_results_and_frees_interrupted(tmp_path: Path) -> None:
    feasible = configs()
    search = open_study(tmp_path / "s.log", "p", feasible, seed=3)
    told = search.ask(10)
    finish(search, told)
    lost = search.ask(4)
    again = open_study(tmp_path / "s.log", "p", feasible, seed=3)
    states = [trial.state.name for trial in again.study.trials]
    assert states.count("RUNNING") == 0
    assert again.study.trials[lost[0].number].user_attrs["fate"] == "interrupted"
    seen: list[Config] = []
    while batch := again.ask(16):
        seen += [proposal.config for proposal in batch]
        finish(again, batch)
    assert set(seen) == set(feasible) - {proposal.config for proposal in told}
    assert len(seen) == len(set(seen))


def test_config_present_at_two_deaths_is_not_tried_again(tmp_path: Path) -> None:
    feasible = configs()
    for _ in range(2):
        open_study(tmp_path / "s.log", "p", feasible, first=feasible[:1]).ask(1)
    third = open_study(tmp_path / "s.log", "p", feasible, first=feasible[:1])
    assert third.ask(1)[0].config != feasible[0]


def test_released_configs_are_free_however_often(tmp_path: Path) -> None:
    feasible = configs()[:3]
    for _ in range(3):  # a tune that ends in time is not a death
        search = open_study(tmp_path / "study.log", "s", feasible)
        proposals = search.ask(3)
        assert {p.config for p in proposals} == set(feasible)
        for proposal in proposals:
            search.release(proposal.number)
    assert search.results() == []
    assert len(search.ask(3)) == 3


def test_a_variant_passed_over_loses_its_first_trials_alone(tmp_path: Path) -> None:
    feasible = configs()
    rows, split = feasible[:2], feasible[-2:]
    search = open_study(tmp_path / "study.log", "s", feasible, first=[*split, *rows])
    search.pass_over("split")
    assert [p.config for p in search.ask(2)] == rows
    assert set(split) <= {p.config for p in search.ask(len(feasible))}


def _ask_and_hang(path: str) -> None:
    search = open_study(path, "p", configs())
    finish(search, search.ask(3))
    search.ask(5)
    os.kill(os.getpid(), signal.SIGKILL)


def test_resume_after_kill_with_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    child = multiprocessing.get_context("spawn").Process(target=_ask_and_hang, args=(str(path),))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"worker_id":"')  # as a kill within a write leaves it
    search = open_study(path, "p", configs())
    states = [trial.state.name for trial in search.study.trials]
    assert len(states) == 8
    assert "RUNNING" not in states
    finish(search, search.ask(4))
    assert len(open_study(path, "p", configs()).results()) == 7


@pytest.mark.parametrize("line", [b"not JSON\n", b'{"op_code": 99}\n', b"[1, 2]\n", b"\xff\n"])
def test_a_damaged_file_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "s.log"
    finish(search := open_study(path, "p", configs()), search.ask(2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(RecordError, match=r"s\.log: the study is damaged.*\n.*delete the file"):
        open_study(path, "p", configs())


def test_live_trials_of_another_process_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    code = (
        "import sys; sys.path[:0] = [sys.argv[2], sys.argv[3]]\n"
        "from test_search_study import configs, open_study\n"
        "s = open_study(sys.argv[1], 'p', configs()); s.ask(6)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    here = Path(__file__).resolve().parent
    arguments = [str(path), str(here), str(here.parents[1])]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        search = open_study(path, "p", configs())
        running = {
            search._sampler.space.config_of(t.params)
            for t in search.study.trials
            if t.state.name == "RUNNING"
        }
        assert len(running) == 6
        assert not running & {proposal.config for proposal in search.ask(20)}
        other.communicate("")


def _work(path: str, out: str) -> None:
    search = open_study(path, "p", configs(), seed=0)
    seen = []
    while batch := search.ask(4):
        seen += [proposal.config.label for proposal in batch]
        finish(search, batch)
    Path(out).write_text("\n".join(seen))


def test_two_processes_share_the_work(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    context = multiprocessing.get_context("spawn")
    outs = [tmp_path / "a", tmp_path / "b"]
    children = [context.Process(target=_work, args=(str(path), str(out))) for out in outs]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    labels = [line for out in outs for line in out.read_text().splitlines()]
    assert sorted(labels) == sorted(config.label for config in configs())


def test_changed_choices_open_a_seeded_study(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    search = open_study(path, "p", configs())
    finish(search, search.ask(30))
    before = dict(search.results())
    edited = configs(vecs=(1, 2, 4, 16))
    search = open_study(path, "p", edited)
    assert search.study.study_name.startswith("p-")
    known = dict(search.results())
    assert known == {config: time for config, time in before.items() if config in set(edited)}
    assert known
    assert not set(known) & {proposal.config for proposal in search.ask(20)}
    # Opened again it is the same study, not seeded twice; and the old space finds its own.
    assert len(open_study(path, "p", edited).results()) == len(known)
    assert open_study(path, "p", configs()).study.study_name == "p"


def test_narrower_rules_keep_the_study(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    search = open_study(path, "p", configs())
    finish(search, search.ask(30))
    narrower = [config for config in configs() if config.as_dict() != configs()[0].as_dict()]
    search = open_study(path, "p", narrower)
    assert search.study.study_name == "p"
    assert configs()[0] not in dict(search.results())


def test_add_known_counts_as_tried(tmp_path: Path) -> None:
    feasible = configs()
    search = open_study(tmp_path / "s.log", "p", feasible)
    backwards = Config("split", tuple(reversed(feasible[-1].values)))
    known = [(feasible[0], 12.5), (feasible[1], None), (backwards, 9.0)]
    assert search.add_known([*known, (Config.of("gone", {"x": 1}), 1.0)]) == 3
    assert search.add_known(known) == 0
    assert search.best() == (feasible[-1], 9.0)
    rest: list[Config] = []
    while batch := search.ask(32):
        rest += [proposal.config for proposal in batch]
        finish(search, batch)
    assert set(rest) == set(feasible) - {feasible[0], feasible[1], feasible[-1]}


@pytest.mark.parametrize("median_us", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(tmp_path: Path, median_us: float) -> None:
    search = open_study(tmp_path / "s.log", "p", configs())
    with pytest.raises(ValueError, match="median_us"):
        search.tell(search.ask(1)[0].number, median_us, "verified")


def test_empty_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        open_study(tmp_path / "s.log", "p", [])


def test_sampler_serves_any_optuna_program() -> None:
    import optuna

    from kgen.search.sampler import FeasibleSampler

    feasible = configs()
    sampler = FeasibleSampler(feasible, seed=1)
    choices = sampler.space.choices
    seen: list[Config] = []

    def objective(trial: optuna.Trial) -> float:
        variant = str(trial.suggest_categorical("variant", choices["variant"]))
        values: dict[str, Any] = {
            name: trial.suggest_categorical(f"{variant}.{name}", choices[f"{variant}.{name}"])
            for name in sampler.space.order[variant]
        }
        config = Config.of(variant, values)
        seen.append(config)
        time = time_us(config)
        if time is None:
            raise optuna.TrialPruned
        return time

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=len(feasible))
    assert set(seen) == set(feasible)
    study.optimize(objective, n_trials=1)  # exhausted: the best once more
    assert time_us(seen[-1]) == 10.0


def test_what_a_config_leaves_out_is_a_parameter_all_the_same(tmp_path: Path) -> None:
    feasible = [
        *(Config.of("rows", {"vec": vec, "warps": warps}) for vec in (1, 2) for warps in (1, 2)),
        *(Config.of("rows", {"vec": vec, "overlap": 1, "warps": 1}) for vec in (1, 2)),
        Config.of("rows", {"vec": 2, "ahead": 1, "warps": 1}),
    ]
    space = ParamSpace.of(feasible)
    assert all(space.config_of(space.to_params(config)) == config for config in feasible)
    assert space.to_params(feasible[0])["rows.overlap"] == "default"
    assert space.choices["rows.overlap"] == (1, "default")
    # A trial that was cut off is not the config that leaves the rest out.
    assert space.config_of({"variant": "rows", "rows.vec": 1, "rows.warps": 1}) is None
    search = open_study(tmp_path / "s.log", "p", feasible)
    seen = []
    while proposals := search.ask(2):
        seen += [proposal.config for proposal in proposals]
        for proposal in proposals:
            search.tell(proposal.number, 5.0, "verified")
    assert set(seen) == set(feasible)
    assert len(seen) == len(feasible)
    known = open_study(tmp_path / "other.log", "p", feasible)
    assert known.add_known([(config, 3.0) for config in feasible]) == len(feasible)
    assert {config for config, _ in known.results()} == set(feasible)


def test_params_round_trip() -> None:
    space = ParamSpace.of(configs())
    assert all(space.config_of(space.to_params(config)) == config for config in configs())
    assert space.config_of({"variant": "rows", "rows.vec": 1}) is None
    assert space.config_of({}) is None
    assert space.digest == ParamSpace.of(reversed(configs())).digest
    assert space.digest != ParamSpace.of(configs(vecs=(1, 2))).digest
