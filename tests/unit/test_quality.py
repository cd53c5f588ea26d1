"""What follows from the findings of a measure-check: numbers, verdicts, text, YAML."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kgen.errors import StorageError
from kgen.measure.stats import Interval
from kgen.measure_check import (
    Quality,
    check_file_writable,
    judge_bars,
    print_bars,
    print_problem,
    write_quality,
)
from kgen.measure_check.model import (
    LibraryCall,
    ProblemQuality,
    SameKernel,
    SameRun,
    TunedWinner,
)


def interval(median: float) -> Interval:
    return Interval(median, median - 0.001, median + 0.001)


def run(seed: int, medians: tuple[float, ...], *differences: float) -> SameRun:
    way = "graph of 64, 97 buffer sets, cold L2"
    protocols = tuple(f"{way}, median +-0.{i + 1} %" for i in range(len(medians)))
    return SameRun(seed, medians, protocols, tuple(map(interval, differences)), {})


def winner(seed: int, digest: str, regret: float) -> TunedWinner:
    return TunedWinner(seed, f"warp({digest})", digest, 10.2, 10.0, interval(regret))


FOUND = ProblemQuality(
    pass_name="forward",
    problem="M=64,N=4096,dtype=bf16",
    same=SameKernel(
        "warp(lanes=32)",
        (
            run(0, (10.0, 10.1, 10.0, 10.1), -0.01, 0.002),
            run(1, (20.0, 20.2, 20.0, 20.2), -0.01, 0.004),
            replace(run(2, (10.0, 10.1, 10.0, 10.1), -0.01, 0.006), clocks={"slowed": "power cap"}),
        ),
    ),
    winners=(winner(0, "aa", 0.0), winner(1, "bb", 0.03), winner(2, "aa", 0.0)),
    library=LibraryCall(10.0, 10.4, interval(0.04), 0.0, "graph of 64"),
)
QUALITY = Quality("rmsnorm", "h200", "cold", {"device": "NVIDIA H200"}, 3, 3, (FOUND,))


def test_differences_have_no_sign_and_an_interval_over_all_pairs() -> None:
    difference = FOUND.same.difference
    assert difference.median == pytest.approx(0.008)
    assert (difference.low, difference.high) == (0.002, 0.01)


def test_bias_by_place_is_relative_to_the_run() -> None:
    """A run at half the clock has the same biases."""
    half = 0.05 / 10.05
    assert FOUND.same.biases == pytest.approx((-half, half, -half, half))
    assert FOUND.same.spread == pytest.approx(1.0)


def test_flips_are_counted_over_pairs_of_tunes() -> None:
    assert FOUND.flip_rate == pytest.approx(2 / 3)
    assert replace(FOUND, winners=FOUND.winners[:1]).flip_rate is None


def test_the_worst_problem_is_judged() -> None:
    good = replace(
        FOUND,
        problem="M=1",
        same=SameKernel("warp", (run(0, (10.0, 10.0), 0.001),)),
        winners=(winner(0, "aa", 0.0), winner(1, "bb", 0.01)),
    )
    same, regret = judge_bars(replace(QUALITY, problems=(good, FOUND)))
    assert (same.kept, same.where) == (False, "forward M=64,N=4096,dtype=bf16")
    assert same.worst == pytest.approx(0.008)
    assert (regret.kept, regret.worst) == (False, 0.03)
    assert [v.kept for v in judge_bars(replace(QUALITY, problems=(good,)))] == [True, True]


def test_one_tune_has_no_regret() -> None:
    _, regret = judge_bars(replace(QUALITY, tunes=1))
    assert regret.kept is None
    assert "not measured" in print_bars([regret])


def test_printed_text_shows_every_contender() -> None:
    text = print_problem(FOUND)
    assert "median |difference| 0.80 % (0.20 to 1.00), 6 pairs; runs differ by 100.00 %" in text
    assert "run 2: 20  20.2  20  20.2 us; pairs -1.00 % (-1.10 to -0.90)  +0.40 %" in text
    assert "bias by place -0.50 %  +0.50 %  -0.50 %  +0.50 %" in text
    assert "slowed: power cap" in text
    assert text.count("(graph of 64, 97 buffer sets, cold L2)") == 1
    assert "67 % of pairs disagree" in text
    assert "trial 10.2 us, final 10 us (-1.96 %), regret +3.00 %" in text
    lines = print_bars(judge_bars(QUALITY)).splitlines()
    assert [line.split()[0] for line in lines] == ["MISSED", "MISSED"]


def test_yaml_has_the_findings(tmp_path: Path) -> None:
    path = tmp_path / "quality.yaml"
    open_ended = replace(
        FOUND, library=replace(FOUND.library, difference=Interval(0.1, -math.inf, math.inf))
    )
    check_file_writable(path)
    write_quality(path, replace(QUALITY, problems=(open_ended,)))
    data = yaml.safe_load(path.read_text())
    (problem,) = data["problems"]
    assert data["gpu"] == "h200"
    assert [v["kept"] for v in data["verdicts"]] == [False, False]
    assert problem["same_kernel"]["runs"][1]["medians_us"] == [20.0, 20.2, 20.0, 20.2]
    assert problem["winners"][1]["regret"]["median"] == 0.03
    assert problem["library"]["difference"] == {"median": 0.1, "low": None, "high": None}


def test_unwritable_yaml_is_found_out_first(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "file.yaml", tmp_path):
        with pytest.raises(StorageError, match="--yaml FILE"):
            check_file_writable(path)
