"""Which winners of earlier tunes a new problem tries first."""

from __future__ import annotations

from pathlib import Path

from kgen.catalogue import open_catalogue
from kgen.journal import Journal
from kgen.model.config import Config
from kgen.model.record import Fate, Record, Timing
from kgen.tune.recorded_winners import (
    LEAST,
    MOST,
    EarlierRecords,
    distance,
    recorded_winners,
)
from kgen.tune.warm_start import warm_start


def records_of(
    problem: str, best: int, count: int = LEAST, gpu: str = "h200", pass_name: str = "forward"
) -> list[Record]:
    """A searched problem: config `best` is the fastest."""
    return [
        Record(
            "", "op", pass_name, problem, gpu, Config.of("v", {"x": x}),
            Fate.VERIFIED, timing=Timing(us, us, us, 1, ""),
        )
        for x, us in ((x, 5.0 if x == best else 10.0 + x) for x in range(count))
    ]  # fmt: skip


def values(configs: list[Config]) -> list[object]:
    return [config.as_dict()["x"] for config in configs]


def test_distance_counts_factors_of_two_and_options() -> None:
    assert distance("M=8,N=64,dtype=bf16", "M=8,N=64,dtype=bf16") == 0
    assert distance("M=8,N=64,dtype=bf16", "M=32,N=32,dtype=bf16") == 3
    assert distance("M=8,dtype=bf16", "M=8,dtype=fp32") == distance("M=8", "M=8,w=bf16") == 4


def test_winners_of_the_nearest_problems_come_first() -> None:
    journal = [
        *records_of("M=1024", 1), *records_of("M=16", 2), *records_of("M=64", 3, gpu="h100"),
        *records_of("M=4", 4), *records_of("M=8", 5),
        *records_of("M=8", 6, pass_name="backward"), *records_of("M=9", 7, count=LEAST - 1),
    ]  # fmt: skip
    assert values(recorded_winners(journal, "forward", "M=8")) == [2, 4, 3]
    assert values(recorded_winners(journal, "forward", "M=512")) == [1, 3, 2]
    assert len(recorded_winners(journal, "forward", "M=1")) == MOST
    assert values(recorded_winners(journal, "backward", "M=1")) == [6]


def test_failed_configs_win_nothing_and_equal_winners_count_once() -> None:
    wrong = Record(
        "", "op", "forward", "M=2", "h200", Config.of("v", {"x": 99}), Fate.WRONG,
        timing=Timing(1.0, 1.0, 1.0, 1, ""),
    )
    journal = [wrong, *records_of("M=2", 3), *records_of("M=4", 3), *records_of("M=8", 1)]
    assert values(recorded_winners(journal, "forward", "M=1")) == [3, 1]


def test_the_problem_itself_counts_only_in_other_folders(tmp_path: Path) -> None:
    own, committed = tmp_path / "out", tmp_path / "generated"
    journals = {
        own / "h200.trials.jsonl": [*records_of("M=8", 1), *records_of("M=64", 2)],
        committed / "h100.trials.jsonl": records_of("M=8", 3, gpu="h100"),
        committed / "h200.trials.jsonl": [
            *records_of("M=16", 4), *records_of("M=8", 5, pass_name="backward"),
        ],
    }  # fmt: skip
    for path, records in journals.items():
        for record in records:
            Journal(path).append(record)
    found = EarlierRecords.read("forward", own, [committed, committed])
    assert values(found.winners("M=8")) == [3, 4, 2]
    # A tune that writes to the committed library resumes its own results.
    found = EarlierRecords.read("forward", committed, [committed / ".." / "generated"])
    assert values(found.winners("M=8")) == [4]
    assert found.elsewhere == ()


def test_recorded_winners_follow_those_of_this_tune_and_leave_the_fallback_last() -> None:
    variants = open_catalogue().entry("rmsnorm").space.of_pass("forward")
    safe = next(v for v in variants if v.safe is not None)
    other = variants[0]
    assert safe.name != other.name
    assert safe.safe is not None
    allowed = {*other.first, safe.safe}
    best, second = other.first[1], other.first[2]
    found = warm_start(variants, allowed, [best], [safe.safe, second, Config.of("gone", {})])
    assert found.configs[:2] == (best, second)
    assert found.fallback == safe.name
    assert found.configs[-1] == safe.safe
