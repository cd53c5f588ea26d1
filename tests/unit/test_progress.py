"""The display of a running tune."""

from __future__ import annotations

import io

from kgen.cli.progress import Display, describe
from kgen.model.record import Fate
from kgen.tune import Progress


def progress(stage: str = "search", trials: int = 57, problem: str = "M=64,N=8") -> Progress:
    return Progress(
        problem=problem, index=2, count=9, stage=stage, trials=trials, wanted=160,
        fates={Fate.VERIFIED: trials - 5, Fate.WRONG: 5}, best_us=3.14159, best="x(a=1)",
        share=0.414, seconds_left=12.2,
    )


def test_a_line_tells_everything() -> None:
    assert describe(progress()) == (
        "[2/9] M=64,N=8  trial 57/160  best 3.142 us, 41 % of the floor  12 s left  "
        "(5 wrong, 52 verified)"
    )
    assert "finalists" in describe(progress("finals"))
    assert "safe variant" in describe(progress("safe"))


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    display = Display(stream)
    for trials in range(10, 40):
        display(progress(trials=trials))
    display(progress("finals"))
    display(progress("done"))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2, "one line per stage, not one per trial"
    assert all("\r" not in line and "\x1b" not in line for line in lines)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_live_line_on_a_terminal() -> None:
    stream = Terminal()
    display = Display(stream)
    display(progress())
    display(progress("done"))
    text = stream.getvalue()
    assert "\n" not in text
    assert text.endswith("\r\x1b[K"), "the line is cleared before results are printed"
