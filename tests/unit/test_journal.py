"""The trial journal: append-only, whole lines, nothing lost."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.errors import RecordError, StorageError
from kgen.journal import Journal, record_from_dict, record_to_dict
from kgen.model.config import Config
from kgen.model.digest import digest_of
from kgen.model.record import (
    Evidence,
    Fate,
    HostRun,
    OutputAccuracy,
    Record,
    Resources,
    Timing,
    Tried,
)

RECORD = Record(
    key="abc",
    operator="rmsnorm",
    pass_name="forward",
    problem="M=1,N=2,dtype=fp32,w_dtype=fp32",
    gpu="h200",
    config=Config.of("plain", {"threads": 32, "cache": "normal", "flag": True}),
    fate=Fate.VERIFIED,
    text_key="bcd",
    source="def",
    code="efg",
    environment="ghi",
    resources=(("rmsnorm_forward", Resources(40, 0, 0, 128)),),
    timing=Timing(1.25, 1.0, 1.5, 30, "graph of 64"),
    accuracy=(OutputAccuracy("y", 1e-7, 4e-7, 2e-7),),
    when="2026-11-21T00:00:00.000+00:00",
)


def test_round_trip() -> None:
    text = json.dumps(record_to_dict(RECORD))
    assert record_from_dict(json.loads(text)) == RECORD


def test_a_trial_that_was_not_built_has_no_code() -> None:
    record = replace(RECORD, key="", code="", fate=Fate.BUILD_FAILED, timing=None, resources=())
    data = record_to_dict(record)
    assert not {"key", "code"} & data.keys()
    assert record_from_dict(data) == record


def test_an_id_is_given_once() -> None:
    renamed = replace(RECORD, config=Config.of("simple", {"lanes": 32}), text_key="another")
    assert renamed.id == RECORD.id
    assert record_from_dict(record_to_dict(renamed)).id == RECORD.id
    assert replace(renamed, id="").id != RECORD.id


def test_records_of_format_1_are_valid_for_their_text() -> None:
    data = record_to_dict(RECORD)
    old = {k: v for k, v in data.items() if k not in ("id", "text_key", "code")} | {"format": 1}
    record = record_from_dict(old)
    assert (record.key, record.text_key, record.code) == ("", "abc", "")
    assert record.id == digest_of(["abc", RECORD.config.digest, RECORD.when])[:8], "as it was"


def test_records_of_a_newer_kgen_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "trials.jsonl")
    journal.append(RECORD)
    newer = json.dumps(record_to_dict(RECORD) | {"format": 3})
    with journal.path.open("a") as file:
        file.write(newer + "\n")
    with pytest.raises(RecordError, match=r"trials.jsonl:2: a record of format 3.*\n.*--out"):
        list(journal.read())


def test_a_certificate_keeps_its_evidence() -> None:
    """All that `kgen verify --record` needs to try the same inputs again."""
    evidence = Evidence(
        seed=7,
        tried=(Tried("normal M=65", 11), Tried("normal", 12)),
        skipped=("normal M=65 odd strides",),
        launches=4,
        bitwise=False,
        host=(HostRun("host g++ 12", (0, 1, 2, 3), (Tried("huge M=2", 13),)),),
        host_missing="host-asan: no answer within 120 s",
    )
    accuracy = (OutputAccuracy("y", 1e-7, 4e-7, 2e-7, 1.5e-7),)
    record = replace(RECORD, evidence=evidence, accuracy=accuracy)
    assert record_from_dict(json.loads(json.dumps(record_to_dict(record)))) == record


def test_append_and_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "trials.jsonl")
    assert list(journal.read()) == []
    failed = replace(RECORD, fate=Fate.WRONG, reason="3 of 4 elements", timing=None, accuracy=())
    journal.append(RECORD)
    journal.append(failed)
    assert list(journal.read()) == [RECORD, failed]


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_tail_loses_only_itself(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path / "trials.jsonl")
    journal.append(RECORD)
    journal.append(RECORD)
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[:-cut])
    journal.append(RECORD)
    assert list(journal.read()) in ([RECORD] * 2, [RECORD] * 3)
    # Cutting the newline alone leaves a whole record; deeper cuts lose that one line.
    assert journal.skipped_lines == (0 if cut == 1 else 1)


def _append_many(path: Path, count: int) -> None:
    for _ in range(count):
        Journal(path).append(RECORD)


def test_concurrent_writers_keep_lines_whole(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, 100)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    journal = Journal(path)
    assert sum(1 for _ in journal.read()) == 400
    assert journal.skipped_lines == 0


def test_no_permission_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        Journal(tmp_path / "file" / "trials.jsonl").append(RECORD)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_a_clear_error() -> None:
    with pytest.raises(StorageError, match="No space left"):
        Journal(Path("/dev/full")).append(RECORD)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 300_000,
        "[]",
        json.dumps({**record_to_dict(RECORD), "resources": [1]}),
        json.dumps({**record_to_dict(RECORD), "resources": {"k": [float("inf")] * 4}}),
        json.dumps({**record_to_dict(RECORD), "accuracy": [1]}),
        json.dumps({**record_to_dict(RECORD), "config": [1]}),
        json.dumps({**record_to_dict(RECORD), "evidence": "x"}),
    ],
    ids=["deep", "list", "resources", "infinite", "accuracy", "config", "evidence"],
)
def test_a_line_of_another_kind_is_skipped(line: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.path.write_text(line + "\n", encoding="utf-8")
    journal.append(RECORD)
    assert list(journal.read()) == [RECORD]
    assert journal.skipped_lines == 1
