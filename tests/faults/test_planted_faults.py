"""Real tunes of templates with one fault each among healthy configs.

Every fault gets its fate, with a reason that names the fault; no faulty config wins; the healthy
configs are found nevertheless.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from planting import DEVICES, by_fault, compiler_for, fates, plant, records, request, run_tune

from kgen.errors import TuneError
from kgen.model.record import Fate, Record
from kgen.tune import finals
from kgen.tune.search_state import SearchState

# The fate of each fault in a trial, and a text that the reason must contain. Further lists have the
# faults that a GPU and the host layer see differently.
SEEN_BY_ALL: dict[str, tuple[Fate, str]] = {
    "endless_loop": (Fate.TIMED_OUT, r"no answer within 15 s; the worker was killed"),
    "endless_compile": (Fate.BUILD_FAILED, r"compile (time|memory)|ended after|memory"),
    "unroll_bomb": (Fate.BUILD_FAILED, r"compile (time|memory)|ended after|memory"),
    "broken": (Fate.BUILD_FAILED, r"error"),
    "unwritten": (Fate.WRONG, r"1 of \d+ elements of y out of bound, 1 of them never written"),
    "past_end": (Fate.WRONG, r"wrote past the end of y"),
    "before_start": (Fate.WRONG, r"wrote before the start of y"),
    "stale_workspace": (Fate.WRONG, r"differs between launches"),
    "differs": (Fate.WRONG, r"y differs between launches on the same inputs"),
    "flag_never_reset": (Fate.WRONG, r"differs between launches|elements of y out of bound"),
    "running_maximum": (Fate.WRONG, r"differs between launches"),
    "writes_over_nan": (Fate.WRONG, r"differs between launches"),
    "wrong_once_in_1000": (Fate.WRONG, r"workspace sums is not the same .* keeps state"),
    "asks_for_host": (Fate.REJECTED, r"asks who compiles it: KGEN_HOST"),
    "static_counter": (Fate.REJECTED, r"global variables.*launches"),
    "out_of_memory": (Fate.REJECTED, r"GiB of workspace"),
}
ON_HOST: dict[str, tuple[Fate, str]] = {
    "illegal_address": (Fate.CRASHED, r"SIGSEGV"),
    "missing_barrier": (Fate.WRONG, r"elements of y out of bound"),
    "divergent_barrier": (Fate.CRASHED, r"barrier"),
    "divergent_shuffle": (Fate.CRASHED, r"shfl_xor"),
    "uninitialised": (Fate.WRONG, r"elements of y out of bound"),
    "prints": (Fate.REJECTED, r"the kernel prints: \d+ bytes in one trial; it begins: row"),
}
ON_GPU: dict[str, tuple[Fate, str]] = {
    "illegal_address": (Fate.CRASHED, r"illegal memory access"),
    "misaligned": (Fate.CRASHED, r"misaligned address"),
    "prints": (Fate.REJECTED, r"global variables.*\$str: the text of a printf"),
    "too_many_registers": (Fate.REJECTED, r"needs \d+ registers per block"),
}
# Faults that need no trial.
BEYOND_THE_HARDWARE = ("too_many_threads", "too_much_shared")
# Trials on that device may let these pass; certificates must not. Reasons as above.
LEFT_TO_CERTIFICATES: dict[str, dict[str, str]] = {
    "host": {
        "wrong_ragged": r"out of bound",
        "wrong_beyond": r"out of bound.*inputs 'normal M=1 N=8193'",
        "wrong_large": r"out of bound.*inputs 'large",
        "ignores_gain": r"out of bound.*inputs 'normal.* gain=0.6875'",
        "no_pointer_guard": r"misaligned load",
        "reads_past_end": r"host-asan.*(heap-buffer-overflow|use-after-poison)",
        "misaligned": r"host-asan.*misaligned",
    },
    "auto": {
        "wrong_ragged": r"out of bound",
        "wrong_beyond": r"out of bound",
        "wrong_large": r"out of bound",
        "ignores_gain": r"out of bound",
        "no_pointer_guard": r"misaligned",
        "reads_past_end": r"host-asan.*(heap-buffer-overflow|use-after-poison)",
        "missing_barrier": r"on the host.*(out of bound|differs)|elements of y out of bound",
        "divergent_barrier": r"on the host.*barrier|no answer within",
        "divergent_shuffle": r"on the host.*shfl_xor|no answer within",
        "uninitialised": r"on the host.*out of bound|elements of y out of bound",
    },
}


@pytest.mark.parametrize("device", DEVICES)
def test_every_fault_gets_its_fate_and_none_wins(tmp_path: Path, device: str) -> None:
    wanted = SEEN_BY_ALL | (ON_HOST if device == "host" else ON_GPU)
    if device == "host":
        # g++ needs no bomb and an endless compilation both to show the limits; CI has two cores.
        wanted = {k: v for k, v in wanted.items() if k != "unroll_bomb"}
    mine = plant(tmp_path, ["none", *wanted, *BEYOND_THE_HARDWARE])
    compiler = compiler_for(device)
    try:
        result = run_tune(request(tmp_path, mine, compiler, device))
    finally:
        compiler.close()
    assert result.results[0].winner.config.as_dict()["fault"] == "none"
    found = by_fault(tmp_path)
    assert {r.fate for r in found.pop("none")} == {Fate.VERIFIED}
    assert set(found) == set(wanted)
    limits = [r for r in result.results[0].refusals if r.rule == "hardware limit"]
    # Both have 64 and 128 threads to choose from; the rule of the planted space takes the latter.
    assert sum(r.configs for r in limits) >= len(BEYOND_THE_HARDWARE), limits
    for fault, (fate, reason) in wanted.items():
        for record in found[fault]:
            assert record.fate is fate, f"{fault}: {record.fate}: {record.reason}"
            assert re.search(reason, record.reason, re.DOTALL), f"{fault}: {record.reason}"
            assert record.timing is None, f"{fault} was timed"
    assert result.worker_restarts >= 2


@pytest.mark.parametrize("device", DEVICES)
def test_what_trials_let_pass_certificates_stop(tmp_path: Path, device: str) -> None:
    compiler = compiler_for(device)
    for fault, reason in LEFT_TO_CERTIFICATES[device].items():
        folder = tmp_path / fault
        folder.mkdir()
        mine = plant(folder, [fault])
        with pytest.raises(TuneError) as caught:
            run_tune(request(folder, mine, compiler, device))
        assert re.search(reason, str(caught.value), re.DOTALL), f"{fault}: {caught.value}"
        assert Fate.VERIFIED not in {r.fate for r in by_fault(folder)[fault][-1:]}
    compiler.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_refused_winner_gives_way_to_the_healthy_best(tmp_path: Path, device: str) -> None:
    """The faulty config does less work, so it is in the finals, first as often as not, and on a
    busy machine alone."""
    mine = plant(tmp_path, ["none", "reads_past_end"])
    compiler = compiler_for(device)
    result = run_tune(request(tmp_path, mine, compiler, device))
    compiler.close()
    winner = result.results[0].winner
    assert winner.config.as_dict()["fault"] == "none"
    assert winner.record.evidence is not None
    orders = [(run.compiler.split()[0], run.orders) for run in winner.record.evidence.host]
    assert orders == [("host", (0, 1, 2, 3)), ("host-asan", (0,))]
    assert len(winner.record.evidence.tried) > 5


@pytest.mark.parametrize("device", DEVICES)
def test_finals_are_played_again_without_the_refused(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faulty config is in the finals alone, as if it were the fastest by far."""
    ranking = SearchState.ranking

    def faulty_first(state: SearchState) -> list[Record]:
        return sorted(ranking(state), key=lambda r: r.config.as_dict()["fault"] == "none")

    monkeypatch.setattr(SearchState, "ranking", faulty_first)
    monkeypatch.setattr(finals, "FINALISTS", 1)
    mine = plant(tmp_path, ["none", "reads_past_end"])
    compiler = compiler_for(device)
    (result,) = run_tune(request(tmp_path, mine, compiler, device)).results
    compiler.close()
    assert [f.config.as_dict()["fault"] for f in result.finalists] == ["none"]
    assert result.fates == {Fate.VERIFIED: 1, Fate.WRONG: 1}
    assert result.new_trials == 2, "what was tried is not tried again"
    certified = [r.config.as_dict()["fault"] for r in records(tmp_path) if r.evidence is not None]
    # Each with its finals, then with its host run; the safe variant's have another problem.
    assert [f for f in certified if f != "none"] == ["reads_past_end"] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_one_wrong_element_of_a_million(tmp_path: Path, device: str) -> None:
    mine = plant(tmp_path, ["wrong_element"])
    compiler = compiler_for(device)
    with pytest.raises(TuneError, match="1 of 1048576 elements of y out of bound"):
        run_tune(request(tmp_path, mine, compiler, device, problem="M=1024,N=1024"))
    compiler.close()
    assert fates(tmp_path)["wrong_element"] == {Fate.WRONG}


def test_a_kernel_that_is_wrong_only_when_it_is_timed_is_refused(tmp_path: Path) -> None:
    """It counts launches in a workspace, but only those that find their results in the outputs.

    It is tried alone: beside a faster config timing may stop before its second such launch.
    """
    mine = plant(tmp_path, ["wrong_when_repeated"])
    compiler = compiler_for("host")
    with pytest.raises(TuneError, match="after it was timed, on values that were not timed"):
        run_tune(request(tmp_path, mine, compiler))
    compiler.close()
    (record,) = by_fault(tmp_path)["wrong_when_repeated"]
    assert record.fate is Fate.WRONG
    assert record.timing is None
    assert "after it was timed, on values that were not timed" in record.reason
