"""Small decisions of a tune: builds too large for an SM, the winner among ties, the device."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import GpuError, SpaceError
from kgen.launch import select
from kgen.launch.select import select_gpu
from kgen.measure.choose import Entrant, pick
from kgen.model.artifact import Artifact
from kgen.model.config import Config
from kgen.model.digest import digest_of
from kgen.model.plan import Launch, Plan, Workspace
from kgen.model.problem import Problem
from kgen.model.record import Fate, OutputAccuracy, Record, Resources
from kgen.runtime.code_digest import Code
from kgen.trial import text_key, trial_key
from kgen.trial.definition import canonical, definition_digest
from kgen.tune.finals import MOST_OF_BOUND, share_of_bound
from kgen.tune.request import TuneRequest, command_options
from kgen.tune.resources import MAX_SPILL_BYTES, resource_refusal
from kgen.tune.reusable_records import CurrentDigests, ReusableRecords, reusable_records
from kgen.tune.safe_claims import safe_dims

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
def test_builds_that_no_sm_holds_are_refused_with_the_reason(
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
    code = Code("digest", {"k": "of k"})
    assert trial_key(code, "c", problem, plan, "warm") != trial_key(code, "c", problem, plan)
    cold = text_key("artifact", problem, plan)
    assert cold == digest_of(
        ["artifact", str(problem), [["k", (1, 1, 1), (32, 1, 1), 0, ()]], []]
    ), "the key as it was before there was a choice"
    assert text_key("artifact", problem, plan, "cold") == cold
    assert text_key("artifact", problem, plan, "warm") != cold


def test_a_key_has_the_code_and_the_plan_and_no_name() -> None:
    problem = Problem((("M", 8),), (("dtype", "fp32"),))

    def key(
        code: str = "digest", compiler: str = "nvrtc 13.0.88 sm_90a", grid: int = 4,
        kernels: tuple[str, str] = ("a", "b"), scratch: str = "partial", elements: int = 64,
        problem: Problem = problem,
    ) -> str:
        first, second = kernels
        plan = Plan(
            (
                Launch(first, (grid, 1, 1), (32, 1, 1), 0, ("x", scratch)),
                Launch(second, (1, 1, 1), (32, 1, 1), 0, (scratch, "y", 8)),
            ),
            (Workspace(scratch, "fp32", elements),),
        )
        functions = {kernels[0]: "of a", kernels[1]: "of b"}
        return trial_key(Code(code, functions), compiler, problem, plan)

    wanted = key()
    assert key(kernels=("other", "names")) == wanted
    assert key(scratch="sums") == wanted
    assert wanted not in {
        key(code="other"), key(compiler="nvrtc 12.8.93 sm_90a"), key(grid=5), key(elements=65),
        key(problem=Problem((("M", 9),), problem.dtypes)),
    }
    swapped = Plan((Launch("b", (1, 1, 1), (1, 1, 1), 0, ()),), ())
    alone = Plan((Launch("a", (1, 1, 1), (1, 1, 1), 0, ()),), ())
    code = Code("digest", {"a": "of a", "b": "of b"})
    assert trial_key(code, "", problem, swapped) != trial_key(code, "", problem, alone)


def test_one_journal_answers_cold_and_warm_tunes() -> None:
    config, other = (Config.of("v", {"lanes": lanes}) for lanes in (1, 2))

    def record(key: str, reason: str, code: str = "") -> Record:
        return Record(
            code, "op", "forward", "M=1", "host", config, Fate.WRONG, reason, text_key=key
        )

    journal = [record("cold", "first"), record("cold", "second"), record("warm", "")]

    def known(key: str) -> ReusableRecords:
        return reusable_records(journal, {config, other}, lambda _: key)

    assert known("cold").valid == {config: journal[1]}
    assert known("warm").valid == {config: journal[2]}
    assert known("changed") == ReusableRecords({}, (), {})
    journal.append(record("cold", "with its code", "code"))
    assert known("changed") == ReusableRecords({}, (config,), {"code": journal[-1]})
    assert known("warm") == ReusableRecords({config: journal[2]}, (), {"code": journal[-1]})


def test_records_of_another_definition_are_let_go() -> None:
    """A record no longer counts for or against a kernel if definition, inputs or guards changed."""
    configs = [Config.of("v", {"lanes": lanes}) for lanes in range(11)]
    configs.append(Config.of("gone", {}))  # another config may still have its machine code
    kinds = [  # fate, definition, guards, reason; whether it is of use
        (Fate.VERIFIED, "today", "guards", "", True),
        (Fate.WRONG, "today", "guards", "", True),
        (Fate.WRONG, "yesterday", "guards", "", False),
        (Fate.VERIFIED, "yesterday", "guards", "", False),
        (Fate.VERIFIED, "today", "others", "", False),
        (Fate.VERIFIED, "", "", "", True),  # from before the digests: it may serve a row
        (Fate.CRASHED, "", "", "", False),
        (Fate.TIMED_OUT, "today", "guards", "no answer within 15 s; killed", False),
        (Fate.TIMED_OUT, "today", "guards", "no answer within 90 s; killed; a certificate has 6 "
         "times the limit of a trial, 15 s", False),
        (Fate.TIMED_OUT, "today", "guards", "no answer within 180 s; killed; a certificate has 6 "
         "times the limit of a trial, 30 s", True),
        (Fate.BUILD_FAILED, "yesterday", "others", "", True),
        (Fate.VERIFIED, "today", "guards", "", False),
    ]
    journal = [
        Record(
            f"code {i}", "op", "forward", "M=1", "host", config, fate, reason, text_key="text",
            definition=definition, guards=guards,
        )
        for i, (config, (fate, definition, guards, reason, _)) in enumerate(
            zip(configs, kinds, strict=True)
        )
    ]

    def guards(config: Config) -> str:
        if config.variant == "gone":
            raise SpaceError("forward has no variant 'gone'")
        return "guards"

    current = CurrentDigests("today", guards, trial_s=30.0)
    found = reusable_records(journal, set(configs), lambda _: "text", current=current)
    useful = {config for config, kind in zip(configs, kinds, strict=True) if kind[-1]}
    assert set(found.valid) == useful
    assert {r.config for r in found.by_code.values()} == useful
    assert found.not_reused == {
        "recorded with another definition or other inputs": 2,
        "recorded with other guards of the variant": 1,
        "recorded with a variant that the search space no longer has": 1,
        "wrong or crashed, recorded without a digest of the definition": 1,
        "timed out within less than the current limit of 30 s": 2,
    }


def test_a_definition_is_known_by_its_code() -> None:
    """Comments and names of peers do not count; what the definition calls does."""
    operator = open_catalogue().entry("rmsnorm").operator
    wanted = definition_digest(operator)
    assert wanted
    assert definition_digest(replace(operator, peers=lambda pass_name: {})) == wanted
    assert definition_digest(replace(operator, cases=())) != wanted
    other = replace(operator, definition=lambda *args: operator.definition(*args))
    assert definition_digest(other) != wanted
    digests = {definition_digest(open_catalogue().entry(n).operator) for n in ("wkv5", "wkv6")}
    assert len(digests) == 2, "they differ in what their inputs are made with"


def test_a_definition_is_spelt_alike_by_every_python() -> None:
    """Python 3.12 gives a function `type_params`; 3.13 leaves fields out that are empty."""
    (function,) = ast.parse("def f(x, *, y=None):\n    return [x, y, []]").body
    spelt = (
        "FunctionDef(name='f', args=arguments(args=[arg(arg='x')], kwonlyargs=[arg(arg='y')], "
        "kw_defaults=[Constant()]), body=[Return(value=List(elts=[Name(id='x', ctx=Load()), "
        "Name(id='y', ctx=Load()), List(ctx=Load())], ctx=Load()))])"
    )
    assert canonical(function) == spelt
    later = type("FunctionDef", (ast.FunctionDef,), {
        "_fields": (*(f for f in function._fields if f != "type_params"), "type_params")
    })  # fmt: skip
    fields = {n: getattr(function, n) for n in function._fields if n != "type_params"}
    assert canonical(later(**fields, type_params=[])) == spelt
    assert canonical(later(**{**fields, "returns": ast.Name("int", ast.Load())})) != spelt


def test_how_much_of_its_bound_a_record_uses() -> None:
    accuracy = (OutputAccuracy("y", 0.5, 1.0, 0.1), OutputAccuracy("z", 0.9, 1.0, 0.1))
    record = Record(
        "", "op", "forward", "M=1", "host", Config.of("v", {}), Fate.VERIFIED, accuracy=accuracy
    )
    assert share_of_bound(record) == 0.9 > MOST_OF_BOUND


@pytest.mark.parametrize(("compiler", "out", "options"), [
    ("nvrtc", "generated", " --path '/my ops'"),
    ("host", "my out", " --path '/my ops' --out 'my out'"),
    ("nvcc", "generated", " --path '/my ops' --compiler nvcc"),
])
def test_options_of_a_command_that_repeats_a_trial(compiler: str, out: str, options: str) -> None:
    request = SimpleNamespace(
        paths=("/my ops",), compiler=SimpleNamespace(name=compiler),
        journal=Path(out, "kgen_ops", "softmax", "reports", "h200.trials.jsonl"),
    )
    assert command_options(cast("TuneRequest", request)) == options
