"""Inputs of a trained model: how operators draw them, and how their times affect a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from search_fakes import PROBLEM, FakeSession, config

from kgen.catalogue import open_catalogue
from kgen.errors import VerifyError
from kgen.journal import record_from_dict, record_to_dict
from kgen.measure.compare import Comparison
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import RANDOM, TRAINED, Fate, Record, Timing
from kgen.operators.base import Operator
from kgen.trial.definition import definition_digest, trained_digest
from kgen.tune.search_state import SearchState
from kgen.tune.second_times import complete_times, is_whole
from kgen.worker.contest import compared, split_by_inputs
from kgen.worker.inputs import slower_of, trained_sets

OPERATORS = ("linear_attention", "rmsnorm", "timex", "wkv4", "wkv5", "wkv5_decode", "wkv6",
             "wkv6_decode", "wkv7", "wkv7_decode")
CPU = torch.device("cpu")
DIGEST = "of trained inputs"


def drawn(
    operator: Operator, pass_name: str, problem: Problem
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(random inputs, trained inputs)."""
    generator = torch.Generator().manual_seed(1)
    random = dict(operator.make_inputs(pass_name, problem, "normal", generator, CPU))
    return random, trained_sets(operator, pass_name, problem, [random], seed=1)[0]


def cases() -> list[tuple[str, str, str]]:
    found = []
    for name in OPERATORS:
        operator = open_catalogue().operator(name)
        for declared in operator.signature.passes:
            texts = operator.default_problems(declared.name, on_host=True)
            more = [f"{texts[0].rsplit('dtype=', 1)[0]}dtype=fp16"]
            found += [(name, declared.name, text) for text in (*texts, *more)]
    return found


@pytest.mark.parametrize(("name", "pass_name", "text"), cases())
def test_trained_inputs_are_inputs_and_their_outputs_are_finite(
    name: str, pass_name: str, text: str
) -> None:
    operator = open_catalogue().operator(name)
    problem = parse_problem(text, operator.signature)
    random, trained = drawn(operator, pass_name, problem)
    assert trained.keys() == random.keys()
    assert any(not torch.equal(trained[n], random[n]) for n in random)
    for tensor_name, tensor in trained.items():
        assert tensor.data_ptr() != random[tensor_name].data_ptr() or tensor.numel() == 0
        if tensor.is_floating_point():
            assert tensor.isfinite().all(), tensor_name
    scalars = operator.arguments(pass_name, problem)
    for output, value in operator.definition(pass_name, trained, scalars).items():
        assert value.isfinite().all(), output


@pytest.mark.parametrize("form", ["log", "raw", "decay"])
@pytest.mark.parametrize("name", ["wkv5", "wkv6", "wkv6_decode"])
def test_some_channels_decay_fast_and_some_hardly(name: str, form: str) -> None:
    """Such a key loses all of a chunk's products if they are formed as quotients of decays."""
    operator = open_catalogue().operator(name)
    text = f"B=1,T=8,H=2,K=64,V=64,dtype=fp32,decay_form={form}"
    text = text.replace("B=1,", "B=1,S=1,") if "decode" in name else text
    random, trained = drawn(operator, "forward", parse_problem(text, operator.signature))

    def log_decays(w: torch.Tensor) -> torch.Tensor:
        return {"log": w, "raw": -w.exp(), "decay": w.log()}[form]

    assert log_decays(random["w"]).min() > -3.75
    decays = log_decays(trained["w"]).reshape(-1, 2, 64)
    strong = (decays.mean(0) < -3.75).sum(-1)
    assert strong.tolist() == [4, 4], "in every head"
    assert ((decays.mean(0) > -1e-3).sum(-1) >= 4).all()


def test_wkv4_and_wkv7_have_the_decays_of_their_initialisations() -> None:
    wkv4 = open_catalogue().operator("wkv4")
    problem = parse_problem("B=1,T=4,C=256,dtype=fp32", wkv4.signature)
    w = drawn(wkv4, "forward", problem)[1]["w"]
    assert w.min() < -15
    assert w.max() > -1e-3
    wkv7 = open_catalogue().operator("wkv7")
    text = "B=1,T=4,H=2,K=64,V=64,dtype=fp32,decay_form=log"
    w = drawn(wkv7, "forward", parse_problem(text, wkv7.signature))[1]["w"]
    assert -0.607 < w.min() < -0.5
    clamped = parse_problem(text.replace("=log", "=clamp"), wkv7.signature)
    logits = drawn(wkv7, "forward", clamped)[1]["w"]
    torch.testing.assert_close(-math.exp(-0.5) * logits.sigmoid(), w)


def test_rmsnorm_has_outliers_whose_rstd_belongs_to_them() -> None:
    operator = open_catalogue().operator("rmsnorm")
    problem = parse_problem("M=513,N=1024,dtype=fp32,rstd_dtype=fp32", operator.signature)
    _, trained = drawn(operator, "backward", problem)
    x = trained["x"]
    assert (x.abs() == 1000.0).sum(1).tolist() == [2, *[0] * 511, 2]
    assert (x.abs().mean(0) > 10).sum() == 2
    torch.testing.assert_close(trained["rstd"], (x.square().mean(1) + 1e-6).rsqrt())


def test_the_definition_does_not_contain_the_trained_inputs() -> None:
    """Records belong to a definition: a new distribution of timing inputs must not discard them."""
    for name in OPERATORS:
        operator = open_catalogue().operator(name)
        assert operator.trained is not None
        none = replace(operator, trained=None)
        assert definition_digest(operator) == definition_digest(none)
        assert trained_digest(none) == ""
    wkv6, wkv7 = (open_catalogue().operator(name) for name in ("wkv6", "wkv7"))
    assert trained_digest(wkv6) != trained_digest(wkv7)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda x: {"x": x["x"][:1]}, r"trained gives torch.float32 \(1, 8\) for 'x'"),
        (lambda x: {"z": x["x"]}, r"trained gives 'z', which is no input of forward"),
        (lambda x: {"x": x["z"]}, r"trained raised KeyError: 'z'"),
    ],
)
def test_faulty_trained_inputs_are_the_operators_fault(
    returned: Callable[[Mapping[str, torch.Tensor]], Any], text: str
) -> None:
    operator = open_catalogue().operator("rmsnorm")
    faulty = replace(operator, trained=lambda of, problem, inputs, generator: returned(inputs))
    problem = parse_problem("M=2,N=8,dtype=fp32", operator.signature)
    with pytest.raises(VerifyError, match=text):
        drawn(faulty, "forward", problem)


def timing(us: float) -> Timing:
    return Timing(us, us - 1, us + 1, 9, f"took {us:g}")


def test_the_slower_time_counts_and_the_other_is_kept() -> None:
    found = slower_of({RANDOM: timing(10.0), TRAINED: timing(40.0)})
    assert (found.median_us, found.inputs, found.protocol) == (40.0, TRAINED, "took 40")
    assert found.by_inputs_us == {RANDOM: 10.0, TRAINED: 40.0}
    assert slower_of({RANDOM: timing(10.0), TRAINED: timing(10.0)}).inputs == RANDOM
    assert slower_of({RANDOM: timing(10.0)}) == timing(10.0)


def test_records_keep_both_times_and_old_ones_are_read() -> None:
    record = Record(
        "key", "op", "forward", "M=8", "h200", config("a", 0), Fate.VERIFIED, trained=DIGEST,
        timing=slower_of({RANDOM: timing(10.0), TRAINED: timing(40.0)}),
    )
    written = record_to_dict(record)
    assert written["time_us"] == [40.0, 39.0, 41.0]
    assert (written["inputs"], written["other_us"]) == (TRAINED, {RANDOM: [10.0, 9.0, 11.0]})
    assert record_from_dict(written) == record
    for key in ("inputs", "other_us", "trained"):
        del written[key]
    old = record_from_dict(written)
    assert old.timing == replace(timing(40.0))
    assert old.trained == ""
    assert "inputs" not in record_to_dict(old)


def test_finals_count_the_slower_inputs_of_each_entrant() -> None:
    times = {
        "0 on random": 10.0, "0 on trained": 40.0, "1 on random": 21.0, "1 on trained": 20.0,
        "peer fla on random": 30.0, "peer fla on trained": 31.0,
        "library on random": 12.0, "library on trained": 41.0,
    }  # fmt: skip

    def compare(entrants: Mapping[str, object]) -> Any:
        assert list(entrants) == list(times)
        timings = {name: timing(us) for name, us in times.items()}
        samples = {name: (us, us) for name, us in times.items()}
        return Comparison(timings, samples, ()), {"throttle": "none"}

    calls = {RANDOM: [lambda: None], TRAINED: [lambda: None]}
    names = ("0", "1", "peer fla", "library")
    found = compared(dict.fromkeys(names, calls), cast("Any", compare))
    assert [t.median_us for t in found.timings] == [40.0, 21.0]
    assert found.samples_us == ((40.0, 40.0), (21.0, 21.0))
    assert {name: t.by_inputs_us for name, t in found.peers.items()} == {
        "fla": {RANDOM: 30.0, TRAINED: 31.0}
    }
    assert found.peer_samples_us == {"fla": (31.0, 31.0)}
    assert found.library is not None
    assert (found.library.median_us, found.library_us) == (41.0, (41.0, 41.0))
    assert found.clocks == {"throttle": "none"}


def test_calls_of_all_sets_are_divided_by_inputs() -> None:
    calls: list[Any] = [object() for _ in range(5)]
    found = split_by_inputs(calls, {RANDOM: [1, 2], TRAINED: [3, 4, 5]})
    assert found == {RANDOM: calls[:2], TRAINED: calls[2:]}


def searched(session: FakeSession, records: list[Record]) -> SearchState:
    state = SearchState()
    for record in records:
        state.add(record)
    return state


def old_record(session: FakeSession, variant: str, place: int, us: float) -> Record:
    return Record(
        f"{variant}{place}", "op", "forward", str(PROBLEM), "h200", config(variant, place),
        Fate.VERIFIED, timing=Timing(us, us, us, 1, ""),
    )


def test_old_records_that_could_win_are_timed_again_until_the_field_is_whole(
    tmp_path: Path,
) -> None:
    session = FakeSession(tmp_path, {"branching": 10.0, "steady": 11.0, "slow": 30.0})
    session.trained, session.us_trained = DIGEST, {"branching": 40.0}
    records = [old_record(session, "branching", place, 10.0) for place in range(4)]
    records += [old_record(session, "steady", 0, 11.0), old_record(session, "slow", 0, 30.0)]
    state = searched(session, records)
    assert state.ranking()[0].config.variant == "branching"
    assert complete_times(session.as_session(), PROBLEM, state) == 5
    assert state.ranking()[0].config.variant == "steady"
    assert [c.variant for c in session.trials] == ["branching"] * 4 + ["steady"]
    assert complete_times(session.as_session(), PROBLEM, state) == 0, "the slow one cannot win"
    assert complete_times(session.as_session(), PROBLEM, state, every=True) == 1
    assert all(is_whole(session.as_session(), record) for record in state.records.values())
    session.trained = "drawn otherwise"
    assert complete_times(session.as_session(), PROBLEM, state) > 0


def test_nothing_is_timed_again_without_trained_inputs(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"a": 10.0})
    state = searched(session, [old_record(session, "a", 0, 10.0)])
    assert complete_times(session.as_session(), PROBLEM, state) == 0
    assert session.trials == []


def test_a_deadline_ends_it_and_what_does_not_build_is_left(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"a": 10.0, "broken": 9.0})
    session.trained = DIGEST
    records = [old_record(session, "broken", 0, 9.0), old_record(session, "a", 0, 10.0)]
    state = searched(session, records)
    assert complete_times(session.as_session(), PROBLEM, state, deadline=-math.inf) == 0
    assert complete_times(session.as_session(), PROBLEM, state) == 1
    assert [r.trained for r in state.ranking()] == ["", DIGEST]
