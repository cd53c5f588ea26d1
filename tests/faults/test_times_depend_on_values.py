"""A kernel whose time depends on values wins on random inputs, and loses on trained inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from planting import (
    by_fault,
    compiler_for,
    journal_path,
    plant,
    request,
    run_tune,
    what_became_of_all,
)

from kgen.build import CompileLimits, Compiler
from kgen.model.record import RANDOM, TRAINED
from kgen.report import Report
from kgen.report.codec import decode, encode
from kgen.tune import Limits, PassResult, search_loop
from kgen.tune.publish import to_report

FAULTS = ["slow_on_large", "always_slow"]
# `trained` as a user's operator would declare it: the same rows, a hundred times as large.
_DECLARED = """
import dataclasses
def _trained(pass_name, problem, inputs, generator):
    return {returned}
OPERATOR = dataclasses.replace(OPERATOR, trained=_trained)
"""
LARGER = '{"x": inputs["x"] * 100}'


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    # Nothing here is slow to compile, so that the limit need not be short on a busy machine.
    made = compiler_for("host", CompileLimits(timeout_s=180.0, memory_bytes=2**31))
    yield made
    made.close()


def planted(folder: Path, returned: str = "") -> Path:
    """The operator; with trained inputs if an expression of them is given."""
    mine = plant(folder, FAULTS)
    if returned:
        with (mine / "operators" / "planted.py").open("a") as module:
            module.write(_DECLARED.format(returned=returned))
    return mine


def tuned(folder: Path, compiler: Compiler, returned: str = "") -> PassResult:
    mine = planted(folder, returned)
    # No config hangs here, so that no limit need be short; the machine may be busy.
    limits = Limits(trial_s=120.0)
    return run_tune(request(folder, mine, compiler, problem="M=1,N=64", limits=limits))


def winner(result: PassResult) -> object:
    return result.results[0].winner.config.as_dict()["fault"]


def _as_an_older_kgen_wrote_it(report: Report) -> Report:
    lines = encode(report).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip() == "others:")
    end = next(i for i in range(begin + 1, len(lines)) if "kernels:" in lines[i])
    kept = [*lines[:begin], *lines[end:]]
    return decode("\n".join(line for line in kept if "inputs: " not in line), "it")


def test_it_wins_without_them_and_its_old_record_is_timed_again(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy CPU one call may wait 25 ms, and would end the timing of a fast kernel.
    monkeypatch.setattr(search_loop, "EARLY_STOP_RATIO", math.inf)
    before = tuned(tmp_path, compiler)
    assert winner(before) == "slow_on_large", what_became_of_all(tmp_path)
    lines = journal_path(tmp_path).read_text().splitlines()
    keys = {key for line in lines for key in json.loads(line)}
    assert not keys & {"trained", "inputs", "other_us"}, "as an older kgen wrote them"

    after = tuned(tmp_path, compiler, LARGER)
    (found,) = after.results
    assert winner(after) == "always_slow", what_became_of_all(tmp_path)
    assert found.new_trials == 0, "the definition is the same: no verdict is lost"
    assert found.timed_again == 2
    timed = [r.timing for r in by_fault(tmp_path)["slow_on_large"] if r.trained]
    assert timed[0] is not None
    assert timed[0].inputs == TRAINED
    assert timed[0].by_inputs_us[RANDOM] < timed[0].by_inputs_us[TRAINED]
    final = found.winner.timing
    assert set(final.by_inputs_us) == {RANDOM, TRAINED}
    assert final.median_us == max(final.by_inputs_us.values())

    report = to_report(after)
    chosen = decode(encode(report), "it").problems[0].chosen.timing
    assert (chosen.inputs, len(chosen.others)) == (final.inputs, 1)
    assert _as_an_older_kgen_wrote_it(report).problems[0].chosen.timing.others == ()
