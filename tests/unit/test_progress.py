"""The display of a running tune: what it shows, on a terminal and in a log."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from kgen.cli.progress import Display, plain_line, render
from kgen.cli.tune_state import PeerTime, Scope, TuneState, spell_time
from kgen.model.config import Config
from kgen.model.record import Fate, Record
from kgen.tune import (
    PassDone,
    PassResult,
    ProblemConfirmed,
    ProblemStarted,
    Progress,
    StageAdvanced,
    StageStarted,
    TrialRecorded,
    TuneEvent,
)

NAME = "B8 T4096 H32 D64 bf16 raw +state"
SCOPE = Scope("wkv6 on H200", {"forward": 9, "backward": 9}, None,
              {("forward", NAME): PeerTime("fla", 6.2832)})


def progress(trials: int = 57, index: int = 2, pass_name: str = "forward") -> Progress:
    return Progress(
        problem="B=8,N=8,T=4096,H=32,K=64,V=64,dtype=bf16,w_dtype=fp32,decay_form=raw",
        index=index, count=9, trials=trials, wanted=160,
        fates={Fate.VERIFIED: trials - 5, Fate.WRONG: 5}, best_us=3.14159, best="x(a=1)",
        share=0.414, seconds_left=None, pass_name=pass_name, name=NAME,
    )


def trial(trials: int = 57, fate: Fate = Fate.VERIFIED, variant: str = "x") -> TuneEvent:
    record = Record(
        key="", operator="wkv6", pass_name="forward", problem="p", gpu="h200",
        config=Config(variant, ()), fate=fate, reason="" if fate is Fate.VERIFIED else "y is wrong",
    )
    return TrialRecorded(record, progress(trials))


DONE = PassDone(cast("PassResult", None))


def state_after(*events: TuneEvent, now: float = 40.0) -> TuneState:
    state = TuneState(SCOPE, 0.0)
    for i, event in enumerate(events):
        state.apply(event, now * (i + 1) / len(events))
    return state


def shown(state: TuneState, now: float, width: int = 80) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(render(state, now))
    return stream.getvalue().splitlines()


def test_a_line_tells_everything() -> None:
    state = state_after(ProblemStarted(progress(0)), trial())
    assert plain_line(state, 40.0) == (
        f"[2/9] forward {NAME}  trial 57/160  best 3.142 us, 41 % of the floor, 2.00x fla  "
        "8 min 11 s left  (52 verified, 5 wrong)"
    )


def test_eighty_columns_show_the_whole_panel() -> None:
    lines = shown(state_after(*[trial(n) for n in range(50, 58)]), 40.0)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert f"forward (1/2) 2/9  {NAME}" in lines[0]
    assert lines[0].rstrip().endswith("8 min 11 s left")
    assert re.search(r"^all .*8 %\s*$", lines[1])
    assert re.search(r"^search .*trial 57/160\s*$", lines[2])
    assert "best 3.142 us, 41 % of the floor, 2.00x fla" in lines[3]
    assert re.search(r"\d\.\d trials/s", lines[3])
    assert "52 verified, 5 wrong" in lines[4]
    assert "…" not in text, "nothing is cut off"


def test_stages_have_their_own_counters() -> None:
    def with_results(count: int) -> PassResult:
        return cast("PassResult", replace_results(count))

    state = state_after(trial(160), StageStarted("finals", progress(160)))
    assert "certifying and comparing the finalists" in shown(state, 41.0)[3]
    state.apply(StageStarted("host runs"), 42.0)
    state.apply(ProblemConfirmed(with_results(3)), 43.0)
    assert "running winners on the CPU, 3 of 9 confirmed" in shown(state, 44.0)[3]
    state.apply(ProblemConfirmed(with_results(9)), 44.0)
    assert "running the safe variant of every dtype on the CPU" in shown(state, 44.0)[3]
    state.apply(StageStarted("safe"), 45.0)
    assert "verifying the safe variant" in plain_line(state, 46.0)
    state.apply(StageAdvanced("compiled", 4), 47.0)
    assert "dtype, 4 compiled, 2 s" in plain_line(state, 47.0)
    state.apply(StageAdvanced("verified", 5, 18), 48.0)
    assert "dtype, 5 of 18 verified" in shown(state, 48.0)[3]
    assert max(map(len, shown(state, 48.0))) <= 80


def replace_results(count: int) -> object:
    class Settled:
        results = (None,) * count

    return Settled()


def test_the_share_of_the_whole_command() -> None:
    state = state_after(trial(80))
    assert state.share_done() == pytest.approx(1.5 / 18)
    state.apply(StageStarted("finals", progress(80)), 41.0)
    assert state.share_done() == pytest.approx(2 / 18)
    state.apply(DONE, 50.0)
    state.apply(ProblemStarted(progress(0, index=1, pass_name="backward")), 51.0)
    assert state.share_done() == pytest.approx(0.5)
    assert state.seconds_left(60.0) == pytest.approx(40.0), "half was done after 50 s"
    assert state.seconds_left(90.0) == pytest.approx(10.0), "it goes down while nothing is done"
    assert state.seconds_left(101.0) is None
    limited = TuneState(replace(SCOPE, time_s=70.0), 0.0, progress(0, 1), passes_done=1)
    assert limited.seconds_left(60.0) == pytest.approx(10.0)


def test_times_are_spelled() -> None:
    assert [spell_time(s) for s in (0.4, 59.4, 61, 3599, 7500)] == [
        "0 s", "59 s", "1 min 01 s", "59 min 59 s", "2 h 05 min"]


def test_a_dead_variant_is_named_once() -> None:
    state = state_after(trial(1), trial(2, Fate.WRONG, "y"), trial(3, Fate.WRONG, "y"),
                        trial(4, Fate.WRONG))
    assert state.dead_variants() == [
        "variant y of forward: none of 2 trials was verified; the first: y is wrong"]


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream, now = io.StringIO(), [0.0]
    display = Display(SCOPE, stream, lambda: now[0])
    for trials in range(10, 40):
        now[0] += 0.5
        display.show(trial(trials))
    display.show(StageStarted("finals", progress()))
    display.show(StageStarted("safe"))
    display.show(DONE)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4, "one line per stage and every ten seconds, not one per trial"
    assert "trial 10/160" in lines[0]
    assert "trial 30/160" in lines[1]
    assert "finalists" in lines[2]
    assert "safe variant" in lines[3]
    assert all("\r" not in line and "\x1b" not in line for line in lines)


def test_plain_lines_come_while_no_event_does() -> None:
    stream = io.StringIO()
    display = Display(SCOPE, stream, every_s=0.05)
    display.show(StageStarted("finals", progress()))
    end = time.monotonic() + 30
    while stream.getvalue().count("\n") < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    display.close()
    before = stream.getvalue()
    time.sleep(0.3)
    assert stream.getvalue() == before, "a closed display writes nothing"
    assert all("certifying and comparing" in line for line in before.splitlines())


def test_a_reader_that_is_gone_ends_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    stream = io.StringIO()
    display = Display(SCOPE, stream, every_s=0.02)
    display.show(StageStarted("finals", progress()))
    stream.close()
    time.sleep(0.3)
    display.close()
    assert died == []


SCRIPT = """
import time
from test_progress import SCOPE, DONE, trial
from kgen.cli.progress import Display
display = Display(SCOPE)
for n in range(20):
    display.show(trial(n + 6))
    time.sleep(0.02)
display.show(DONE)
print("summary")
"""


def in_a_terminal(**environment: str) -> str:
    """What a script writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=theirs, stdin=theirs, close_fds=True,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24",
             "PYTHONPATH": os.pathsep.join(folders), **environment},
    )
    os.close(theirs)
    text = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.05)[0]:
            try:
                text += os.read(ours, 65536)
            except OSError:  # the terminal's other side is closed
                break
    os.close(ours)
    assert process.wait() == 0, text.decode()
    return text.decode()


def test_a_panel_on_a_terminal_that_is_gone_at_the_end() -> None:
    text = in_a_terminal()
    assert "trial 25/160" in text
    assert "\x1b[1m" in text, "bold"
    last = text.rsplit("summary", 1)[0]
    assert last.rstrip().endswith("\x1b[2K"), "the panel is cleared before results are printed"


def test_no_color_leaves_colours_out() -> None:
    text = in_a_terminal(NO_COLOR="1")
    assert "trial 25/160" in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", text)
