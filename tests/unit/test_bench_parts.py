"""Benches on the host layer, in this process: ladders, peers, refusals, and the printed tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.bench import (
    BenchReport,
    ChosenConfig,
    LadderResult,
    LadderStepResult,
    PeerComparison,
    PeerTime,
    TimedKernel,
    load_bench,
    print_comparison,
    print_ladder,
    write_bench,
)
from kgen.bench.ladder import run_ladder
from kgen.bench.peer_comparison import compare_with_peers
from kgen.bench.profile import run_profile
from kgen.build import open_compiler
from kgen.catalogue import open_catalogue, profile_named
from kgen.check import Sizes
from kgen.errors import BenchError, RecordError
from kgen.model.config import Config
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate, OutputAccuracy, Timing
from kgen.report import Environment
from kgen.trial import Session
from kgen.worker import Finals, FinalsOutcome, PeerNames, Setup, Trial, TrialOutcome
from kgen.worker.runner import Runner

HOST = profile_named("host")
ENTRY = open_catalogue().entry("rmsnorm")
LADDER = ENTRY.space.ladder
# Of input sets: kernels are checked elsewhere, benches are here.
FEW_BYTES = Sizes(small=2**12, quick=2**12, pool=2**14, fresh=1)


class Watched(Runner):
    """A worker in this process that notes what it was asked to time, and can find all wrong."""

    def __init__(self) -> None:
        setup = Setup("rmsnorm", (), HOST, 0, seed=1)
        super().__init__(ENTRY.operator, setup, FEW_BYTES)
        self.timed: list[Finals] = []
        self.certified: list[Config] = []
        self.verdict: TrialOutcome | None = None

    def trial(
        self, trial: Trial, begins: Callable[[int], None] = lambda place: None
    ) -> TrialOutcome:
        assert trial.level == "certify"
        assert not trial.measure
        self.certified.append(trial.candidate.config)
        outcome = self.verdict or super().trial(trial, begins)
        # A, B and A again; on a CPU more launches would be the same again.
        assert outcome.evidence is None or outcome.evidence.launches == 3
        return outcome

    def finals(self, finals: Finals) -> FinalsOutcome:
        self.timed.append(finals)
        return super().finals(finals)


@pytest.fixture(scope="module")
def runner() -> Watched:
    return Watched()


@pytest.fixture
def session(runner: Watched, tmp_path: Path) -> Iterator[Session]:
    runner.timed.clear()
    runner.certified.clear()
    runner.verdict = None
    compiler = open_compiler("host", [include_dir()])
    yield Session(ENTRY, "forward", HOST, compiler, tmp_path / "none.jsonl", runner)  # type: ignore[arg-type]
    compiler.close()


def problem(text: str) -> Problem:
    return parse_problem(text, ENTRY.operator.signature)


def safe_choice() -> ChosenConfig:
    safe = ENTRY.space.safe_variant("forward").safe
    assert safe is not None
    return ChosenConfig(safe, "safe", "not tuned")


def test_contest_times_the_named_peers_only(session: Session, runner: Watched) -> None:
    found = compare_with_peers(
        session, problem("M=9,N=64,dtype=fp32"), safe_choice(), ("eager",), 10.0
    )
    assert [p.name for p in found.peers] == ["eager"]
    assert found.failed == {}
    (peer,) = found.peers
    assert peer.ratio_low is not None
    assert peer.ratio_high is not None
    assert 0 < peer.ratio_low <= peer.ratio <= peer.ratio_high
    assert found.kernel.timing.samples == peer.timing.samples
    assert found.kernel.floor_share == found.floor_us / found.kernel.timing.median_us
    assert found.kernel.accuracy[0].error <= found.kernel.accuracy[0].bound
    (asked,) = runner.timed
    assert [c.config for c in asked.candidates] == runner.certified == [safe_choice().config]


def test_a_peer_that_the_pass_lacks_is_named(session: Session) -> None:
    against = ("eager", "fft")
    found = compare_with_peers(
        session, problem("M=9,N=64,dtype=fp32"), safe_choice(), against, 10.0
    )
    assert [p.name for p in found.peers] == ["eager"]
    assert found.failed == {"fft": "no peer of forward"}


def test_peer_names(runner: Watched) -> None:
    assert runner.peer_names(PeerNames("forward")).names[:2] == ("eager", "torch.compile")


def test_a_wrong_kernel_is_not_timed(session: Session, runner: Watched) -> None:
    runner.verdict = TrialOutcome(Fate.WRONG, "3 of 9 elements of y out of bound\n  worst y[0, 0]")
    with pytest.raises(BenchError, match="nothing was timed") as caught:
        compare_with_peers(session, problem("M=9,N=64,dtype=fp32"), safe_choice(), None, 10.0)
    assert "naive(threads=256) is wrong" in str(caught.value)
    assert "3 of 9 elements" in str(caught.value)
    assert "kgen verify --op rmsnorm --gpu host" in str(caught.value)
    with pytest.raises(BenchError):
        run_ladder(session, problem("M=9,N=64,dtype=fp32"), LADDER, 10.0)
    assert not runner.timed


def test_ladder_has_every_published_step(session: Session, runner: Watched) -> None:
    """256 threads are beyond what a search on the host tries: efficiency does not refuse a step."""
    found = run_ladder(session, problem("M=9,N=1024,dtype=fp32"), LADDER, 10.0)
    assert [r.step for r in found.rungs] == [s.name for s in LADDER]
    assert runner.certified == [s.config for s in LADDER]
    assert len(runner.timed) == 1
    assert runner.timed[0].peers == ()
    assert found.rungs[0].speed_up == 1.0
    for rung, step in zip(found.rungs, LADDER, strict=True):
        assert not rung.refused
        assert rung.timing is not None
        assert rung.speed_up is not None
        assert rung.speed_up > 0
        assert rung.published == step.published
        assert rung.accuracy[0].error <= rung.accuracy[0].bound


def test_ladder_names_the_rule_that_refuses_a_step(session: Session, runner: Watched) -> None:
    found = run_ladder(session, problem("M=9,N=67,dtype=bf16"), LADDER, 10.0)
    refused = {r.step: r for r in found.rungs if r.refused}
    assert set(refused) == {"float4 shared", "float4 warp"}
    for rung in refused.values():
        assert "a vector must not cross the end of a row (N % vec == 0;" in rung.refused
        assert "search_spaces/rmsnorm.yaml:" in rung.refused
        assert (rung.timing, rung.speed_up, rung.floor_share) == (None, None, None)
    assert len(runner.certified) == 3


def test_no_step_stands_in_for_a_refused_first_one(session: Session, runner: Watched) -> None:
    steps = (LADDER[3], LADDER[0])  # float4, then naive
    found = run_ladder(session, problem("M=9,N=67,dtype=bf16"), steps, 10.0)
    assert found.rungs[0].refused
    assert found.rungs[1].timing is not None
    assert found.rungs[1].speed_up is None
    alone = run_ladder(session, problem("M=9,N=67,dtype=bf16"), steps[:1], 10.0)
    assert alone.rungs[0].refused
    assert len(runner.timed) == 1


@pytest.mark.full
def test_a_profile_verifies_first_and_runs_slow_peers_too(
    session: Session, runner: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pt.trace.json"
    slow = replace(ENTRY.operator, slow_peers=("eager",))
    monkeypatch.setattr(runner, "_operator", slow)
    small = problem("M=9,N=64,dtype=fp32")
    ran = run_profile(session, small, safe_choice(), None, path)
    assert [c.name for c in ran.contenders][:2] == ["kgen", "eager"]
    assert ran.contenders[1].largest.startswith("aten::")
    assert not ran.on_gpu
    assert path.exists()
    assert runner.certified == [safe_choice().config]
    # A tune's comparison leaves it out unless it is named.
    assert "eager" not in [
        p.name for p in compare_with_peers(session, small, safe_choice(), None, 10.0).peers
    ]
    named = compare_with_peers(session, small, safe_choice(), ("eager",), 10.0)
    assert [p.name for p in named.peers] == ["eager"]
    runner.verdict = TrialOutcome(Fate.WRONG, "y is wrong")
    path.unlink()
    with pytest.raises(BenchError):
        run_profile(session, small, safe_choice(), None, path)
    assert not path.exists()


TIMING = Timing(987.0, 986.4, 987.7, 41, "graph of 2, cold L2")
ACCURACY = (OutputAccuracy("y", 0.0039, 0.03, 0.0077),)
CONTEST = PeerComparison(
    "forward",
    "M=262144,N=4096,dtype=bf16",
    "tuned",
    "",
    1003.6,
    TimedKernel("warp", {"lanes": 32, "stream": True}, TIMING, 1.0168, ACCURACY),
    (
        PeerTime("eager", replace(TIMING, median_us=1193.6), 0.84, 1.2094, 1.2083, 1.2101,
                 (OutputAccuracy("y", 0.0041, 0.03, 0.0077), OutputAccuracy("h", 1.0, 1.0, 1.0))),
        PeerTime("slow", replace(TIMING, median_us=0.5), 0.5, 0.5, None, None),
    ),
    {"liger": "ImportError: no"},
    {"throttle": "power"},
)
CLIMB = LadderResult(
    "forward",
    "M=262144,N=4096,dtype=fp32",
    2008.0,
    (
        LadderStepResult(
            "naive", "naive", {"threads": 256}, "91 %, H100", "", "", TIMING, 0.9, 1.0, ACCURACY
        ),
        LadderStepResult(
            "float4", "row", {"vec": 4}, "", "as published", "a reason (N % vec == 0; f:1)"
        ),
    ),
    {},
)
PRINTED_CONTEST = """\
forward M=262144,N=4096,dtype=bf16, floor 1.004 ms
  warp(lanes=32, stream=true)
                   time            quartiles  over kgen   95 % interval  of floor
  kgen, tuned    987 us  986.4 us - 987.7 us          1                     102 %
  eager        1.194 ms  986.4 us - 987.7 us      1.209   1.208 - 1.210      84 %
  slow           0.5 us  986.4 us - 987.7 us      0.500  too few rounds      50 %
  liger did not run: ImportError: no
  error of y: kgen 3.90e-03, eager 4.10e-03, bound 3.00e-02
  graph of 2, cold L2
  the clocks were reduced: power
"""
PRINTED_CLIMB = """\
forward M=262144,N=4096,dtype=fp32, floor 2.008 ms
  step    kernel                 time  of floor  speed-up   published
  naive   naive(threads=256)   987 us      90 %    1.00 x  91 %, H100
  float4  row(vec=4)          refused
  float4: refused: a reason (N % vec == 0; f:1)
  graph of 2, cold L2
"""


def test_printed() -> None:
    assert print_comparison(CONTEST) == PRINTED_CONTEST
    assert print_ladder(CLIMB) == PRINTED_CLIMB


def test_a_safe_choice_is_called_so() -> None:
    text = print_comparison(replace(CONTEST, origin="safe", remark="not tuned; kgen tune --op x"))
    assert "kgen, safe" in text
    assert "not tuned; kgen tune --op x" in text


def test_yaml_round_trip(tmp_path: Path) -> None:
    environment = Environment("H200", "580", "nvrtc", "13.0", "2.11", "3.12", "0.1", "abc", 4278.0)
    report = BenchReport("rmsnorm", "h200", environment, (CONTEST,), (CLIMB,))
    path = tmp_path / "deep" / "bench.yaml"
    write_bench(path, report)
    assert load_bench(path) == report
    path.write_text(path.read_text().replace("origin:", "orgin:"))
    with pytest.raises(RecordError, match=r"bench.yaml:\d+: contests\[0\].orgin: unknown key"):
        load_bench(path)
    path.write_text(path.read_text().replace("schema: 1", "schema: 7"))
    with pytest.raises(RecordError, match=r"(?s)schema is 7.*run 'kgen bench' again"):
        load_bench(path)
    with pytest.raises(RecordError, match="cannot be read"):
        load_bench(tmp_path / "nowhere.yaml")
