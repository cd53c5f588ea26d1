"""The parts of `kgen predict`: features, models, what they learn from, and how they are judged."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kgen.catalogue import Entry, open_catalogue, profile_named
from kgen.cli import tuning_options
from kgen.emit.binding import BoundPlan
from kgen.emit.state import PREDICTED, TUNED, GpuState, RowState, TableState
from kgen.errors import GpuError, RecordError
from kgen.launch import select
from kgen.model.plan import Launch, Plan
from kgen.model.record import Resources
from kgen.predict import models
from kgen.predict.features import Featurizer, _of_plan, residency
from kgen.predict.judge import LEAST_CONFIGS, judge, print_judgements
from kgen.predict.models import DEFAULT, MODELS, Fitted, Predict, Training
from kgen.predict.observations import read_searches
from kgen.predict.training import Predictor, read_training_searches, relatives
from kgen.predict.trees import Floats, Growth, fit_trees
from kgen.report.predictions import (
    ModelReport,
    Prediction,
    Predictions,
    load_predictions,
    predictions_path,
    print_predictions,
    update_predictions,
)
from kgen.search.feasible import enumerate_feasible
from kgen.search.surrogate import Hyper, Posterior

ROOT = Path(__file__).parents[2]
JOURNAL = ROOT / "generated/kgen_ops/rmsnorm/reports/h200.trials.jsonl"
H200 = profile_named("h200")


@pytest.fixture(scope="module")
def rmsnorm() -> Entry:
    return open_catalogue().entry("rmsnorm")


def launch(threads: int, grid: int = 1000, smem: int = 0) -> Launch:
    return Launch("k", (grid, 1, 1), (threads, 1, 1), smem, ())


def used(registers: int, smem: int = 0) -> Resources:
    return Resources(registers, 0, 0, smem)


@pytest.mark.parametrize(("of", "resources", "blocks", "occupancy"), [
    (launch(256), None, 8, 1.0),  # threads: 2048
    (launch(64), None, 32, 1.0),  # blocks: 32
    (launch(256), used(64), 4, 0.5),  # registers: 64 * 256 * 4 = 65536
    (launch(256), used(65), 3, 0.375),  # 65 count as 72
    (launch(256, smem=100_000), used(32, 10_000), 2, 0.25),  # shared memory, 1 KB more per block
    (launch(1024, smem=240_000), None, 0, 0.0),  # does not fit
])
def test_residency(
    of: Launch, resources: Resources | None, blocks: int, occupancy: float
) -> None:
    found = residency(of, resources, H200)
    assert (found.blocks_per_sm, found.occupancy) == (blocks, occupancy)
    assert found.waves == 1000 / (max(1, blocks) * 132)


def test_no_shared_memory_is_reserved_before_ampere() -> None:
    assert residency(launch(64, smem=32768), None, profile_named("t4")).blocks_per_sm == 2
    assert residency(launch(64, smem=83968), None, profile_named("a100")).blocks_per_sm == 1


def test_trees_find_a_product_of_features_among_noise() -> None:
    random = np.random.default_rng(0)
    rows = random.integers(0, 4, (400, 12)).astype(float)
    rows[:, 3] = rows[:, 3] > 1  # fewer thresholds than the others have
    y = np.where((rows[:, 3] > 0) & (rows[:, 7] > 1), 2.0, 0.0) + 0.1 * rows[:, 1]
    model = fit_trees(rows[:300], y[:300], np.ones(300), Growth(trees=120, depth=3))
    error = np.abs(model.predict(rows[300:]) - y[300:])
    assert error.mean() < 0.2 < y.std() / 4
    again = fit_trees(rows[:300], y[:300], np.ones(300), Growth(trees=120, depth=3))
    assert (again.predict(rows) == model.predict(rows)).all()


def test_trees_of_nothing_are_the_mean_and_weights_move_it() -> None:
    rows, y = np.ones((4, 2)), np.array([0.0, 0.0, 0.0, 4.0])
    assert fit_trees(rows, y, np.ones(4), Growth()).predict(rows).tolist() == [1.0] * 4
    heavy = fit_trees(rows, y, np.array([1.0, 1.0, 1.0, 5.0]), Growth())
    assert heavy.predict(rows).tolist() == [2.5] * 4


@pytest.mark.parametrize("name", MODELS)
def test_every_model_orders_what_it_has_learnt(name: str) -> None:
    rows = [{"a": float(i % 5), "b": float(i % 3), f"c_{i % 2}": 1.0} for i in range(60)]
    y = np.array([row["a"] for row in rows])
    order = Fitted(name, Training(rows, y, y + 1, np.ones(60))).order(
        [{"a": a, "unknown": 9.0} for a in (3.0, 0.0, 4.0, 1.0)])
    assert np.argsort(order).tolist() == [1, 3, 0, 2]


def test_the_gaussian_process_is_that_of_the_search() -> None:
    random = np.random.default_rng(0)
    rows, at = random.normal(size=(80, 5)), random.normal(size=(9, 5))
    y = rows[:, 0] + random.normal(size=80)
    hyper = Hyper(np.full(5, -np.log(5)), 0.0, float(np.log(0.05)))
    wanted = Posterior(rows, (y - y.mean()) / y.std(), at, np.arange(5), hyper).mean
    found = MODELS["gp"](rows, y, np.ones(80))(at)
    assert found == pytest.approx(wanted * y.std() + y.mean(), rel=1e-6)


def test_the_gaussian_process_learns_the_rows_that_count_most(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_MOST_ROWS", 4)
    monkeypatch.setattr(models, "_BATCH", 2)
    rows = np.array([[float(i)] for i in range(8)])
    y = np.array([5.0, 1.0, 9.0, 2.0, 9.0, 3.0, 9.0, 4.0])
    near = np.array([0.1, 1.0, 0.1, 1.0, 0.1, 1.0, 0.1, 1.0])
    found = MODELS["gp"](rows, y, near)(rows)
    assert found == pytest.approx(MODELS["gp"](rows[1::2], y[1::2], np.ones(4))(rows))
    assert found[1] < found[3] < found[5] < found[7]


def test_the_mixed_model_is_the_mean_of_trees_and_process() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(60, 3))
    trees, gp, mixed = (
        MODELS[name](rows, rows[:, 0], np.ones(60))(rows) for name in ("trees", "gp", "mixed"))
    assert mixed == pytest.approx((trees + gp) / 2)
    assert np.abs(trees - gp).max() > 0.01


def test_the_option_and_the_model_agree() -> None:
    assert tuning_options.DEFAULT_MODEL == DEFAULT
    parser = argparse.ArgumentParser()
    tuning_options.add_predict(parser)
    (option,) = [x for x in parser._actions if x.dest == "model"]
    assert option.choices == list(MODELS)


def _lines(count: int, wanted: str = '"pass": "forward"') -> list[str]:
    """The records of the first problems of the committed journal that were searched cold."""
    problems: dict[str, list[str]] = {}
    for line in JOURNAL.read_text().splitlines():
        if wanted in line and "cold L2" in line and '"evidence"' not in line:
            problems.setdefault(json.loads(line)["problem"], []).append(line)
    searched = [lines for lines in problems.values() if len(lines) >= 40]
    return [line for lines in searched[:count] for line in lines[:40]]


def _library(folder: Path, lines: Sequence[str], gpu: str = "h200") -> Path:
    path = folder / "kgen_ops/rmsnorm/reports" / f"{gpu}.trials.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return folder


def test_what_counts_as_observed(tmp_path: Path, rmsnorm: Entry) -> None:
    lines = _lines(1)
    first = json.loads(lines[0])
    warm = {**first, "protocol": first["protocol"].replace("cold", "warm"), "problem":
            first["problem"].replace("M=", "M=1")}
    old = {**first, "config": {**first["config"], next(iter(first["config"])): 12345}}
    later = {**first, "time_us": [7.0, 7.0, 7.0]}
    finals = {**first, "evidence": {"seed": 0, "tried": [], "launches": 1, "bitwise": True},
              "time_us": [1.0, 1.0, 1.0]}
    records = [*lines, *map(json.dumps, (warm, old, finals, later))]
    (found,) = read_searches(rmsnorm, _library(tmp_path, records))
    assert found.gpu is H200
    assert len(found.observations) == len({json.dumps(json.loads(x)["config"]) for x in lines})
    assert found.observations[0].median_us == 7.0, "a later trial of a config replaces it"
    assert found.best_us > 1.0, "certificates repeat the times of finals"
    assert read_searches(rmsnorm, tmp_path / "nowhere") == []
    assert read_searches(rmsnorm, _library(tmp_path / "host", lines, "host")) == []


def test_relatives_share_a_family() -> None:
    catalogue = open_catalogue()
    assert [e.operator.name for e in relatives(catalogue, catalogue.entry("wkv6"))] == ["wkv5"]
    assert relatives(catalogue, catalogue.entry("rmsnorm")) == ()


def test_no_time_of_a_judged_problem_reaches_its_model(
    tmp_path: Path, rmsnorm: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _library(tmp_path, _lines(3))
    searches = read_training_searches((rmsnorm,), (library,), "forward")
    slowdowns = [np.log(one.times_us / one.times_us.min()) for one in searches]
    seen: list[Floats] = []

    def fit(rows: Floats, y: Floats, weights: Floats) -> Predict:
        seen.append(y)
        return lambda at: at.sum(axis=1)

    monkeypatch.setattr(models, "MODELS", {"sum": fit})
    (found,) = judge(rmsnorm, ["forward"], library, models=["sum"])
    assert len(found.choices) == len(searches) == 3
    # Four fits for each problem: bare and compiled features, slowdown and excess.
    assert len(seen) == 12
    for place in range(3):
        taught = seen[4 * place]
        others = np.concatenate([s for i, s in enumerate(slowdowns) if i != place])
        assert taught.tolist() == others.tolist()


def test_a_judgement_tells_losses_and_what_it_did_not_see(
    tmp_path: Path, rmsnorm: Entry
) -> None:
    library = _library(tmp_path, [*_lines(2), *_lines(3)[80:90]])
    (found,) = judge(rmsnorm, ["forward", "backward"], library, models=["ridge"])
    assert (found.too_small, found.gpus, len(found.choices)) == (1, ("h200",), 2)
    for choice in found.choices:
        assert 15 < choice.measured <= 40 < choice.feasible
        assert choice.loss >= 0
    changed = replace(found, choices=(
        replace(found.choices[0], loss=0.02, free_loss=None),
        replace(found.choices[1], loss=0.5, free_loss=0.25)))
    text = print_judgements([changed])
    assert "median loss 26.0 % (bar 10.0 %: missed), worst 50.0 % (bar 35.0 %: missed by 1)" in text
    assert "1 of 2 seen" in text
    assert "leave one GPU out: not judged, because all records are of h200" in text
    assert "1 problems with fewer than 15" in text
    assert LEAST_CONFIGS == 15


def test_processes_do_not_change_a_judgement(tmp_path: Path, rmsnorm: Entry) -> None:
    library = _library(tmp_path, _lines(3))
    _library(tmp_path, [x.replace('"h200"', '"h100"') for x in _lines(2)], "h100")
    alone, both = (
        list(judge(rmsnorm, ["forward"], library, models=["ridge"], processes=processes))
        for processes in (1, 2)
    )
    assert [len(one.choices) for one in alone] == [5, 5]
    assert alone == both


def test_two_gpus_are_not_called_one(tmp_path: Path, rmsnorm: Entry) -> None:
    library = _library(tmp_path, _lines(2))
    _library(tmp_path, [x.replace('"h200"', '"h100"') for x in _lines(2)], "h100")
    found = list(judge(rmsnorm, ["forward"], library, models=["ridge"]))
    assert {one.left_out for one in found} == {"problem", "GPU"}
    by_gpu = next(one for one in found if one.left_out == "GPU")
    assert {choice.gpu for choice in by_gpu.choices} == {"h100", "h200"}
    changed = replace(by_gpu, choices=tuple(
        replace(choice, loss=0.45 if choice.gpu == "h100" else 0.05) for choice in by_gpu.choices))
    text = print_judgements([*(one for one in found if one is not by_gpu), changed])
    _, h100, h200 = text.split("leave ")[1:4]
    assert h100.startswith("h100 out: ")
    assert "median loss 45.0 % (bar 15.0 %: missed), worst 45.0 % (bar 50.0 %: met)" in h100
    assert h200.startswith("h200 out: ")
    assert "median loss 5.0 % (bar 15.0 %: met), worst 5.0 % (bar 50.0 %: met)" in h200
    assert "GPU out: not judged" not in text


def test_a_level_is_that_of_the_nearest_problems(tmp_path: Path, rmsnorm: Entry) -> None:
    searches = read_training_searches((rmsnorm,), (_library(tmp_path, _lines(1)),), "forward")
    (one,) = searches
    found = Predictor("ridge", rmsnorm, one.searched.problem, searches).best_us(2 * one.floor_us)
    assert found == pytest.approx(2 * one.times_us.min())
    # A tiny problem takes as long as the shortest launch.
    least = min(float(each.times_us.min()) for each in searches)
    assert Predictor("ridge", rmsnorm, one.searched.problem, searches).best_us(1e-6) == least


def test_features_of_a_config_that_is_not_compiled_name_no_registers(rmsnorm: Entry) -> None:
    search = read_training_searches((rmsnorm,), (ROOT / "generated",), "forward")[0]
    problem = search.searched.problem
    pass_ = rmsnorm.operator.signature.pass_named("forward")
    space = enumerate_feasible(rmsnorm.space.of_pass("forward"), pass_, problem, H200)
    features = Featurizer(rmsnorm.operator, "forward", problem, H200)
    config = space.configs[0]
    variant = rmsnorm.space.variant("forward", config.variant)
    bare = features.of(variant, config, None)
    kernel = variant.launches[0].kernel
    compiled = features.of(variant, config, ((kernel, used(255)),))
    assert "registers" not in bare
    assert compiled["registers"] == 255
    assert compiled["occupancy"] < bare["occupancy"]
    on_a100 = Featurizer(rmsnorm.operator, "forward", problem, profile_named("a100"))
    assert on_a100.floor_us > features.floor_us
    assert on_a100.of(variant, config, None)["log_waves"] > bare["log_waves"]


def test_features_of_how_a_grid_uses_the_sms() -> None:
    kernels = {"k": used(64), "end": used(32)}
    main, end = launch(256, grid=198), replace(launch(64, grid=33), kernel="end")
    found = dict(_of_plan(Plan((main, end), ()), kernels, H200))
    assert found["log_per_sm"] == np.log2(1.5)
    assert found["balance"] == 0.75  # an SM has 2 blocks, another 1
    assert found["log_active_warps"] == np.log2(1 + 2 * 8)  # 4 blocks would fit
    assert found["log_rounds"] == 0
    assert found["log_other_rounds"] == 1
    assert found["other_registers"] == 32
    # 32 blocks of 64 threads fit, and 33 run on 132 SMs.
    assert found["other_occupancy"] == pytest.approx(33 / (32 * 132))
    alone = dict(_of_plan(Plan((main,), ()), kernels, H200))
    assert alone["other_occupancy"] == 1.0
    assert alone["log_other_rounds"] == alone["other_registers"] == 0
    assert {"balance", "log_other_threads"} <= dict(_of_plan(Plan((main,), ()), None, H200)).keys()
    assert "balance" not in dict(_of_plan(Plan((launch(256, grid=0),), ()), kernels, H200))


# Rows and the report


def row(origin: str, record: str, m: int = 8) -> RowState:
    return RowState(
        "forward", (("M", m),), (("dtype", "fp32"),), "v", (), (), "k", record, 1.0,
        BoundPlan((), ()), origin,
    )


def test_a_prediction_never_replaces_a_measurement() -> None:
    gpu = GpuState("a100", "A100", (), "sm_80", ())
    table = TableState(gpu, ()).with_rows(gpu, [row(PREDICTED, "p1"), row(PREDICTED, "p2", m=9)])
    assert [r.record for r in table.rows] == ["p1", "p2"]
    table = table.with_rows(gpu, [row(PREDICTED, "p3")])
    assert [r.record for r in table.rows] == ["p3", "p2"], "a later prediction replaces one"
    table = table.with_rows(gpu, [row(TUNED, "t1")])
    assert [r.record for r in table.rows] == ["t1", "p2"], "a measurement replaces one"
    table = table.with_rows(gpu, [row(PREDICTED, "p4")])
    assert [r.record for r in table.rows] == ["t1", "p2"], "and none replaces it"


def prediction(problem: str, us: float = 3.0) -> Prediction:
    return Prediction(
        "forward", problem, "v", {"a": 1}, "abcd", "src", "code", "nvrtc 13", us, 1.0, 10, 4,
        ("v(a=2): spills",), (), (), ModelReport("trees", ("h200",), 9),
    )


def test_a_report_of_predictions_keeps_what_is_not_measured(tmp_path: Path) -> None:
    path = predictions_path(tmp_path, "h200")
    update_predictions(path, Predictions("rmsnorm", "h200", (prediction("M=1"),)))
    update_predictions(path, Predictions("rmsnorm", "h200", (prediction("M=1", 5.0),
                                                            prediction("M=2"))))
    found = load_predictions(path)
    assert [(p.problem, p.predicted_us) for p in found.problems] == [("M=1", 5.0), ("M=2", 3.0)]
    text = print_predictions(found)
    assert text.startswith("rmsnorm on h200: predicted, not measured\n")
    assert "about 5 us (floor 1), v(a=1), record abcd" in text
    report = (ROOT / "generated/kgen_ops/rmsnorm/reports/h200.yaml").read_text()
    (tmp_path / "h200.yaml").write_text(report)
    measured = next(x for x in report.splitlines() if "problem:" in x).split(": ")[1]
    update_predictions(path, Predictions("rmsnorm", "h200", (prediction(measured),)))
    assert [p.problem for p in load_predictions(path).problems] == ["M=1", "M=2"]
    assert print_predictions(replace(found, problems=())) == ""
    path.write_text("schema: 1\n")
    with pytest.raises(RecordError, match="operator: missing"):
        load_predictions(path)


def test_which_gpu_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "detect_gpus", lambda: ["NVIDIA A100-SXM4-80GB"])
    assert select.absent_gpu("a100") is None
    assert select.absent_gpu("auto") is None
    assert select.absent_gpu("host") is None
    absent = select.absent_gpu("h200")
    assert absent is not None
    assert absent.name == "h200"
    with pytest.raises(GpuError, match="unknown GPU 'a1000'"):
        select.absent_gpu("a1000")
