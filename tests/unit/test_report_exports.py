"""Searches as Optuna studies, T4 results and Kernel Tuner caches."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from test_report_brief import FASTER, report, rows

from kgen.cli.main import main
from kgen.errors import RecordError, StorageError
from kgen.journal import Journal
from kgen.model.config import Config, Value
from kgen.model.record import Fate, Record, Timing
from kgen.report import write_report, write_whole
from kgen.report.exchange import kernel_tuner_cache, t4_results, write_exchange
from kgen.report.imported import read_search
from kgen.report.searches import Search, searches_of
from kgen.report.studies import StudyOf, distributions_of, spans_of, write_studies

BEGIN = datetime.fromisoformat("2026-11-21T12:00:00.000+00:00")


def trial(
    seconds: float, us: float | None, fate: Fate = Fate.VERIFIED, variant: str = "warp",
    **values: Value,
) -> Record:
    return Record(
        key="", operator="rmsnorm", pass_name="forward", problem=FASTER.problem, gpu="h200",
        config=Config.of(variant, values), fate=fate,
        reason="" if fate is Fate.VERIFIED else "y[3] is wrong",
        timing=Timing(us, us - 1, us + 1, 6, "graph of 4") if us else None,
        when=(BEGIN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds"),
    )


TRIALS = (
    trial(0.0, 20.0, lanes=16, vec=1, stream=True),
    trial(2.0, 12.0, lanes=32, vec=8, stream=False),
    trial(5.0, None, Fate.WRONG, "smem", threads=256, vec=4),
    trial(900.0, 15.0, Fate.VERIFIED, "smem", threads=512, vec=2, share=0.5),
)
SEARCH = Search(TRIALS)
ROW = rows(FASTER)[0]


def opened(path: Path) -> list[optuna.Study]:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    sqlite = path.suffix == ".db"
    storage: Any = f"sqlite:///{path}" if sqlite else JournalStorage(JournalFileBackend(str(path)))
    names = optuna.get_all_study_names(storage)
    return [optuna.load_study(study_name=name, storage=storage) for name in names]


@pytest.mark.parametrize("name", ["s.log", "s.db"])
def test_a_study_has_the_search_as_it_was(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    study_of = StudyOf.of_row(ROW, SEARCH)
    assert write_studies(path, [study_of, StudyOf.of_row(ROW, Search(()))]) == 4
    assert write_studies(path, [study_of]) == 4, "a file that is there is replaced"
    assert [file.name for file in tmp_path.iterdir()] == [name]
    (study,) = opened(path)
    assert study.study_name == "rmsnorm forward M1 N8 bf16 h200"
    assert study.best_value == 12.0
    assert study.best_params == {"variant": "warp", "lanes": 32, "vec": 8, "stream": False}
    assert study.user_attrs["final_us"] == 10.0
    states = [t.state.name for t in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    assert study.trials[2].user_attrs["reason"] == "y[3] is wrong"
    for found, record in zip(study.trials, TRIALS, strict=True):
        assert found.datetime_complete is not None
        assert found.datetime_complete.astimezone() == datetime.fromisoformat(record.when)
    assert study.trials[1].duration == timedelta(seconds=2)


def test_numbers_are_ordered_and_the_variant_is_one_parameter() -> None:
    found = distributions_of(TRIALS)
    assert found["variant"] == CategoricalDistribution(["smem", "warp"])
    assert found["vec"] == IntDistribution(1, 8, log=True)
    assert found["lanes"] == IntDistribution(16, 32)
    assert found["stream"] == CategoricalDistribution([False, True])
    assert found["share"] == FloatDistribution(0.5, 0.5)
    mixed = [trial(0, 1.0, x=1), trial(1, 1.0, x="all")]
    assert distributions_of(mixed)["x"] == CategoricalDistribution([1, "all"])
    both = distributions_of([trial(0, 1.0, x=1), trial(1, 1.0, x=True)])["x"]
    assert isinstance(both, CategoricalDistribution)
    assert [type(choice) for choice in both.choices] == [bool, int]


def test_a_trial_begins_when_the_one_before_ends() -> None:
    spans = [span for span in spans_of(TRIALS) if span is not None]
    seconds = [(end - begin).total_seconds() for begin, end in spans]
    assert seconds == [2.5, 2.0, 3.0, 2.5], "the first of a tune takes the median of the others"


def test_importances_of_what_was_written(tmp_path: Path) -> None:
    records = [trial(i, 10.0 + 5 * (i % 4) + 0.1 * (i % 3), lanes=2 ** (i % 4), vec=2 ** (i % 3))
               for i in range(24)]
    write_studies(tmp_path / "s.log", [StudyOf.of_row(ROW, Search(tuple(records)))])
    (study,) = opened(tmp_path / "s.log")
    importances = optuna.importance.get_param_importances(study)
    assert max(importances, key=lambda name: importances[name]) == "lanes"


def test_t4_results() -> None:
    data = t4_results(SEARCH)
    assert data["schema_version"] == "1.0.0"
    first, second, third, _ = data["results"]
    assert set(first) >= {"configuration", "times", "invalidity", "correctness"}
    assert second["measurements"] == [{"name": "time", "value": 0.012, "unit": "ms"}]
    assert second["configuration"] == {"variant": "warp", "lanes": 32, "vec": 8, "stream": False,
                                       "threads": "-", "share": "-"}
    assert (third["invalidity"], third["correctness"]) == ("correctness", 0.0)
    fates = {t4_results(Search((trial(0, None, f),)))["results"][0]["invalidity"] for f in Fate}
    assert fates == {"correct", "constraints", "compile", "correctness", "timeout", "runtime"}


def test_kernel_tuner_cache() -> None:
    cache = kernel_tuner_cache(ROW, SEARCH, "NVIDIA H200")
    keys = cache["tune_params_keys"]
    assert keys[0] == "variant"
    assert set(cache["tune_params"]) == set(keys)
    for key, entry in cache["cache"].items():
        assert key == ",".join(str(entry[name]) for name in keys)
        assert all(entry[name] in cache["tune_params"][name] for name in keys)
        assert {"time", "times", "compile_time", "verification_time", "benchmark_time",
                "strategy_time", "framework_time", "timestamp"} <= set(entry)
    assert [entry["time"] for entry in cache["cache"].values()] == [
        0.02, 0.012, "RuntimeFailedConfig", 0.015]


def test_the_command_writes_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "kgen_ops" / "rmsnorm" / "reports"
    write_report(where / "h200.yaml", report(FASTER))
    for record in TRIALS:
        Journal(where / "h200.trials.jsonl").append(record)
    study, folder = tmp_path / "s.log", tmp_path / "t4"
    options = ["--optuna", str(study), "--t4", str(folder)]
    assert main(["report", "--out", str(tmp_path), *options]) == 0
    assert capsys.readouterr().out == f"wrote {study}, {folder}\n"
    assert len(opened(study)) == 1
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [
        "rmsnorm_forward_M1_N8_bf16_h200.cache.json", "rmsnorm_forward_M1_N8_bf16_h200.t4.json"]
    assert json.loads(files[0].read_text())["device_name"] == "NVIDIA H200"
    assert searches_of(TRIALS).keys() == {("forward", FASTER.problem)}
    assert len(write_exchange(folder, ROW, SEARCH, "x")) == 2


def test_what_was_exported_is_read_back(tmp_path: Path) -> None:
    for file in write_exchange(tmp_path, ROW, SEARCH, "NVIDIA H200"):
        found = read_search(file).search
        assert [(t.config.variant, t.config.as_dict()) for t in found.trials] == [
            (t.config.variant, t.config.as_dict()) for t in TRIALS]
        assert [t.fate is Fate.VERIFIED for t in found.trials] == [True, True, False, True]
        for one, other in zip(found.timed, SEARCH.timed, strict=True):
            assert one.timing is not None
            assert other.timing is not None
            assert one.timing.median_us == pytest.approx(other.timing.median_us)
            assert one.timing.low_us == pytest.approx(other.timing.low_us)


def test_a_cache_of_kernel_tuner_that_is_still_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "open.json"
    entry = {"bx": 32, "by": 1, "time": 3.5, "times": [3.4, 3.5, 3.6],
             "timestamp": "2023-12-22 09:54:07.470476+00:00"}
    refused = {**entry, "bx": 64, "time": "CompilationFailedConfig"}
    head = {"device_name": "Testing", "kernel_name": "convolution", "problem_size": [64, 64],
            "tune_params_keys": ["bx", "by"], "tune_params": {"bx": [32, 64], "by": [1]}}
    whole = json.dumps({**head, "cache": {"32,1": entry, "64,1": refused}})
    file.write_text(whole.removesuffix("}}") + ",\n")
    study = tmp_path / "s.log"
    assert main(["import-cache", str(file), str(file), "--optuna", str(study)]) == 0
    assert "2 studies, 4 trials" in capsys.readouterr().out
    first, second = opened(study)
    assert first.study_name == "convolution [64, 64] Testing"
    assert second.study_name == "convolution [64, 64] Testing (2)"
    assert first.best_params == {"variant": "convolution", "bx": 32, "by": 1}
    assert first.best_value == 3500.0
    assert first.trials[1].user_attrs["fate"] == "build_failed"


@pytest.mark.parametrize(("text", "says"), [
    ("{}", "expected: an object with 'results' or 'cache'"),
    ("nothing", "JSONDecodeError"),
    ("[" * 100_000, "RecursionError"),
    ('{"results": []}', "holds no result of any config"),
    ('{"results": [{}]}', "KeyError: 'invalidity'"),
    ('{"results": [{"invalidity": "correct", "times": {}, "configuration": {"a": [1]}}]}',
     "parameter 'a' is [1]"),
])
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(RecordError) as caught:
        read_search(file)
    assert str(file) in str(caught.value)
    assert says in str(caught.value)


def test_kernel_tuner_replays_what_was_exported(tmp_path: Path) -> None:
    """Its simulation mode reads the cache file, and answers with the times in it."""
    kernel_tuner = pytest.importorskip("kernel_tuner", reason="Kernel Tuner is not installed")
    write_exchange(tmp_path, ROW, SEARCH, "NVIDIA H200")
    (file,) = tmp_path.glob("*.cache.json")
    cache = json.loads(file.read_text())
    best = cache["cache"]["warp,32,8,False,-,-"]
    found, _ = kernel_tuner.tune_kernel(
        cache["kernel_name"], "", cache["problem_size"], [],
        {name: [best[name]] for name in cache["tune_params_keys"]},
        lang="C", simulation_mode=True, cache=str(file), quiet=True,
    )  # fmt: skip
    assert [one["time"] for one in found] == [0.012]


@pytest.mark.parametrize("write", [
    lambda path: write_whole(path, "text"),
    lambda path: write_studies(path, []),
])
def test_writing_replaces_neither_devices_nor_links(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with contextlib.suppress(StorageError):
            write(pipe)
        assert pipe.is_fifo()
    finally:
        os.close(reader)
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
