"""What a tune publishes that ends early: rows, and the safe kernels that are certified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue
from kgen.cli.tune_state import Scope, TuneState
from kgen.emit import SafeKernel, emit
from kgen.emit.state import read_safe
from kgen.emit.untuned import untuned_safe_kernels
from kgen.errors import RecordError
from kgen.tune import (
    PassDone,
    PassResult,
    ProblemConfirmed,
    SafeCertified,
    StageStarted,
    TuneEvent,
    job,
)

ENTRY = open_catalogue().entry("rmsnorm")


def result(safe: int, missing: int, problems: int = 1) -> PassResult:
    """A pass with so many safe kernels."""
    request = SimpleNamespace(problems={"forward": (None,)})
    dtypes = tuple({"dtype": f"d{i}"} for i in range(missing))
    return PassResult(
        cast(Any, request), "forward", {}, 1.0, cast(Any, (None,) * problems),
        cast(Any, (None,) * safe), dtypes, 0,
    )


def published_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, events: list[TuneEvent | BaseException]
) -> list[int]:
    """Number of safe kernels in each publication."""
    said: list[int] = []

    def tune(request: object) -> Iterator[TuneEvent]:
        for event in events:
            if isinstance(event, BaseException):
                raise event
            yield event

    def publish(found: PassResult, out: Path, reports: Path) -> Any:
        said.append(len(found.safe))

    monkeypatch.setattr(job, "tune", tune)
    monkeypatch.setattr(job, "publish", publish)
    endings = tuple(type(event) for event in events if isinstance(event, BaseException))
    running = job.tune_and_publish(cast(Any, None), tmp_path, tmp_path)
    if endings:
        with pytest.raises(endings):
            list(running)
    else:
        list(running)
    return said


def test_a_tune_that_ends_early_publishes_what_is_certified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row, more, whole = result(1, 3), result(3, 1), result(4, 0)
    events: list[TuneEvent | BaseException] = [ProblemConfirmed(row), SafeCertified(more)]
    ended: list[TuneEvent | BaseException] = [*events, KeyboardInterrupt()]
    assert published_by(monkeypatch, tmp_path, ended) == [1, 3]
    assert published_by(monkeypatch, tmp_path, [*events, PassDone(whole)]) == [1, 4]
    assert published_by(monkeypatch, tmp_path, [ProblemConfirmed(row), KeyboardInterrupt()]) == [1]
    assert published_by(monkeypatch, tmp_path, [ProblemConfirmed(whole), PassDone(whole)]) == [4]
    assert published_by(monkeypatch, tmp_path, [KeyboardInterrupt()]) == []


def test_publishing_takes_a_tenth_of_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A publication that takes 10 s, and 40 problems that are confirmed 5 s after each other."""
    now, said, last = 0.0, [], []

    def tune(request: object) -> Iterator[TuneEvent]:
        nonlocal now
        for i in range(40):
            now += 5.0
            yield ProblemConfirmed(result(i, 1))
        last.append(now)
        yield StageStarted("host runs")  # no other problem is confirmed for long
        now += 90.0
        yield StageStarted("host runs")

    def publish(found: PassResult, out: Path, reports: Path) -> Any:
        nonlocal now
        said.append(len(found.safe))
        now += 10.0

    monkeypatch.setattr(job, "tune", tune)
    monkeypatch.setattr(job, "publish", publish)
    monkeypatch.setattr(job, "time", SimpleNamespace(monotonic=lambda: now))
    list(job.tune_and_publish(cast(Any, None), tmp_path, tmp_path))
    assert said == [0, 18, 36, 39], "the first at once, the last when there is time"
    assert 0.15 * last[0] >= 10.0 * (len(said) - 1)


def test_a_reader_that_stops_gets_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SIGTERM may come while an event is shown."""
    said: list[int] = []

    def tune(request: object) -> Iterator[TuneEvent]:
        yield SafeCertified(result(3, 1))
        raise AssertionError("it was closed")

    def publish(found: PassResult, out: Path, reports: Path) -> Any:
        said.append(len(found.safe))

    monkeypatch.setattr(job, "tune", tune)
    monkeypatch.setattr(job, "publish", publish)
    events = job.tune_and_publish(cast(Any, None), tmp_path, tmp_path)
    next(events)
    assert said == []
    events.close()
    assert said == [3]


def test_what_is_missing_is_said() -> None:
    state = TuneState(Scope(), 0.0)
    state.apply(ProblemConfirmed(result(1, 9)), 1.0)
    said = state.missing_text()
    assert "safe kernels of 1 of 10 combinations" in said
    assert "the same command certifies the others" in said
    assert "dtype=d5\n  and 3" in said
    state.apply(SafeCertified(result(9, 1)), 2.0)
    assert "9 of 10" in state.missing_text()
    assert "and" not in state.missing_text().splitlines()[-1]
    state.apply(PassDone(result(10, 0)), 3.0)
    assert state.missing_text() == ""


def test_a_state_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [k for k in untuned_safe_kernels(ENTRY, include_dir()) if k.pass_name == "forward"]
    path = tmp_path / "kgen_ops" / "rmsnorm" / "safe.yaml"
    emit(tmp_path, [], kernels[:1], include_dir(), is_whole=False)
    first = read_safe(path)
    loads = 0

    def load(*arguments: Any, **keywords: Any) -> Any:
        nonlocal loads
        loads += 1
        return real(*arguments, **keywords)

    real = yaml.load
    monkeypatch.setattr(yaml, "load", load)
    assert read_safe(path) == first
    assert loads == 0
    path.write_text(path.read_text().replace("pass: forward", "pass: backward"))
    assert [one.pass_name for one in read_safe(path)] == ["backward"]
    assert loads == 1
    path.write_text("rows: [")
    with pytest.raises(RecordError, match=r"safe\.yaml does not have the format"):
        read_safe(path)


def test_a_part_of_the_safe_kernels_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    """A library gets no kernel that is not certified, and loses none."""
    kernels = [k for k in untuned_safe_kernels(ENTRY, include_dir()) if k.pass_name == "forward"]
    path = tmp_path / "kgen_ops" / "rmsnorm" / "safe.yaml"

    def dtypes() -> list[dict[str, str]]:
        return [dict(one.dtypes) for one in read_safe(path)]

    def code(number: int) -> SafeKernel:
        return replace(kernels[number], code=(("sm_90a", f"code{number}"),))

    emit(tmp_path, [], [code(3)], include_dir(), is_whole=False)
    assert dtypes() == [kernels[3].dtypes]
    emit(tmp_path, [], [code(1)], include_dir(), is_whole=False)
    assert dtypes() == [kernels[3].dtypes, kernels[1].dtypes]
    emit(tmp_path, [], kernels, include_dir())
    assert dtypes() == [kernel.dtypes for kernel in kernels]
    # A certificate of a kernel whose text is the same stays, and is not one of another's.
    codes = [dict(one.code) for one in read_safe(path)]
    assert [i for i, its in enumerate(codes) if its] == [1, 3]
    at_once = tmp_path / "at once"
    emit(at_once, [], [code(i) if i in (1, 3) else k for i, k in enumerate(kernels)],
         include_dir())
    assert path.read_bytes() == (at_once / "kgen_ops" / "rmsnorm" / "safe.yaml").read_bytes()
