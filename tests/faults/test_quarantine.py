"""A config that crashed is not tried again, unless that is requested."""

from __future__ import annotations

from pathlib import Path

from planting import compiler_for, fates, plant, records, request, run_tune

from kgen.model.record import Fate
from kgen.tune import Progress


def test_a_resumed_tune_does_not_touch_what_crashed(tmp_path: Path) -> None:
    mine = plant(tmp_path, ["none", "illegal_address", "broken"])
    compiler = compiler_for("host")
    first = run_tune(request(tmp_path, mine, compiler))
    assert first.worker_restarts == 1
    before = len(records(tmp_path))
    seen: list[Progress] = []
    again = run_tune(request(tmp_path, mine, compiler), seen.append)
    compiler.close()
    assert again.worker_restarts == 0
    assert again.results[0].new_trials == 0
    assert seen[0].fates[Fate.CRASHED] == 1
    assert len(records(tmp_path)) == before  # certificates are kept, too


def test_retry_tries_again_what_crashed_and_nothing_else(tmp_path: Path) -> None:
    mine = plant(tmp_path, ["none", "illegal_address", "broken"])
    compiler = compiler_for("host")
    run_tune(request(tmp_path, mine, compiler))
    before = len(records(tmp_path))
    again = run_tune(request(tmp_path, mine, compiler, retry=True))
    compiler.close()
    assert again.results[0].new_trials == 1
    tried = [r for r in records(tmp_path)[before:] if r.evidence is None]
    assert [r.config.as_dict()["fault"] for r in tried] == ["illegal_address"]
    assert fates(tmp_path)["illegal_address"] == {Fate.CRASHED}
