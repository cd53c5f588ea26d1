"""Small decisions of a tune: hopeless builds, the winner among ties, which device is meant."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from itertools import repeat
from typing import cast

import pytest

from kgen.catalogue import open_catalogue, profile_named
from kgen.choose import Entrant, pick
from kgen.errors import GpuError
from kgen.model.artifact import Artifact, Rendered
from kgen.model.config import Config
from kgen.model.digest import digest_of
from kgen.model.plan import Launch, Plan
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record, Resources
from kgen.tune import safe
from kgen.tune.known import still_valid
from kgen.tune.request import SafeResult
from kgen.tune.resources import MAX_SPILL_BYTES, resource_refusal
from kgen.tune.safe import safe_dims
from kgen.worker import HostProver, Session, TrialOutcome, select, trial_key
from kgen.worker.select import select_gpu

H200 = profile_named("h200")


@pytest.mark.parametrize(
    ("threads", "dynamic", "used", "part"),
    [
        (256, 0, Resources(64, 0, 0, 1024), ""),
        (1024, 0, Resources(64, 0, 0, 0), ""),
        (1024, 0, Resources(65, 0, 0, 0), "registers per block"),
        (256, 230_000, Resources(32, 0, 0, 8_000), "bytes of shared memory"),
        (256, 0, Resources(255, MAX_SPILL_BYTES, 64, 0), ""),
        (256, 0, Resources(255, MAX_SPILL_BYTES + 4, 64, 0), "spills"),
    ],
)
def test_hopeless_builds_are_refused_with_the_reason(
    threads: int, dynamic: int, used: Resources, part: str
) -> None:
    plan = Plan((Launch("k", (1, 1, 1), (threads, 1, 1), dynamic, ()),), ())
    artifact = Artifact("cubin", "path", "key", (("k", used),), 0.1)
    refusal = resource_refusal(artifact, plan, H200)
    assert (part in refusal) if part else (refusal == "")


def test_the_faster_wins_and_ties_go_to_fewer_registers_then_the_digest() -> None:
    slow = Entrant(tuple(11.0 + 0.01 * i for i in range(20)), 16, "a")
    tied = tuple(10.0 + 0.001 * i for i in range(20))
    assert pick([slow, Entrant(tied, 64, "b")]) == [1, 0]
    assert pick([Entrant(tied, 64, "b"), Entrant(tied, 32, "c")]) == [1, 0]
    assert pick([Entrant(tied, 32, "c"), Entrant(tied, 32, "b")]) == [1, 0]


def test_safe_kernels_are_certified_at_ragged_extents_of_what_does_not_repeat() -> None:
    extents = {name: dict(safe_dims(open_catalogue().entry(name).operator))
               for name in ("rmsnorm", "timex", "linear_attention", "wkv6")}
    assert extents["rmsnorm"] == {"M": 67, "N": 67}
    assert extents["timex"] == {"B": 67, "C": 67, "T": 67}
    assert extents["linear_attention"] == {"B": 3, "H": 3, "T": 67, "E": 67, "M": 67}
    assert extents["wkv6"].items() >= {"B": 3, "T": 67, "H": 3, "K": 67, "V": 67}.items()
    # Not said: the first dims are few, so that five dims are no billion elements.
    silent = replace(open_catalogue().entry("linear_attention").operator, repeats=())
    assert [extent for _, extent in safe_dims(silent)] == [3, 3, 67, 67, 67]


def test_certificates_that_wait_for_no_host_run_are_written_down_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tune that is ended during the host runs need not make them again."""
    written: list[str] = []

    def claim(name: str) -> safe._Claim:
        rendered = Rendered(name, name, name)
        artifact = Artifact("cubin", "path", "key", (), 0.1)
        return safe._Claim(Problem((), ()), rendered, artifact, name, name == "pair")

    def started(session: object, prover: object, one: safe._Claim) -> safe._Claim:
        return replace(one, proof=Future()) if one.shows_a_pair else one

    def settled(session: object, one: safe._Claim) -> SafeResult:
        written.append(one.key)
        return cast(SafeResult, one.key)

    monkeypatch.setattr(safe, "_built", lambda session: [claim("pair"), claim("source")])
    monkeypatch.setattr(safe, "_looked_up", lambda session, one: one)
    outcome = TrialOutcome(Fate.VERIFIED, "")
    monkeypatch.setattr(safe, "_outcomes", lambda session, prover, claims: repeat(outcome))
    monkeypatch.setattr(safe, "_with_proof_started", started)
    monkeypatch.setattr(safe, "_settled", settled)
    certificates = safe.SafeCertificates(cast(Session, None), cast(HostProver, None))
    assert written == ["source"]
    assert not certificates.done
    assert [str(result) for result in certificates.results()] == ["pair", "source"]
    assert sorted(written) == ["pair", "source"], "each is written once"


def test_which_device_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(*names: str) -> None:
        monkeypatch.setattr(select, "detect_gpus", lambda: list(names))

    seen()
    assert select_gpu("auto")[0].is_host
    seen("Some Prototype", "NVIDIA H200")
    assert select_gpu("auto") == (H200, 1)
    assert select_gpu("h200") == (H200, 1)
    assert select_gpu("host")[0].is_host
    with pytest.raises(GpuError, match=r"Some Prototype .no profile., NVIDIA H200 .--gpu h200."):
        select_gpu("t4")
    seen("Some Prototype")
    with pytest.raises(GpuError, match="device_names"):
        select_gpu("auto")


def test_a_warm_time_has_a_key_of_its_own_and_old_keys_stay_valid() -> None:
    plan = Plan((Launch("k", (1, 1, 1), (32, 1, 1), 0, ()),), ())
    problem = Problem((("M", 8),), (("dtype", "fp32"),))
    cold = trial_key("artifact", problem, plan)
    assert cold == digest_of(
        ["artifact", str(problem), [["k", (1, 1, 1), (32, 1, 1), 0, ()]], []]
    ), "the key as it was before there was a choice"
    assert trial_key("artifact", problem, plan, "cold") == cold
    assert trial_key("artifact", problem, plan, "warm") != cold


def test_one_journal_answers_cold_and_warm_tunes() -> None:
    config, other = (Config.of("v", {"lanes": lanes}) for lanes in (1, 2))

    def record(key: str, reason: str) -> Record:
        return Record(key, "op", "forward", "M=1", "host", config, Fate.WRONG, reason)

    journal = [record("cold", "first"), record("cold", "second"), record("warm", "")]
    rendered = Rendered("rmsnorm", "text", "digest")

    def known(key: str) -> dict[Config, Record]:
        return still_valid(journal, {config, other}, lambda _: (key, rendered))

    assert known("cold") == {config: journal[1]}
    assert known("warm") == {config: journal[2]}
    assert known("changed") == {}
