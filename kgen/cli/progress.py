"""The display of a running tune: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kgen.cli.tune_state import (
    Scope,
    TuneState,
    best_facts,
    spell_fates,
    spell_time,
    stage_text,
)
from kgen.tune import PassDone, ProblemStarted, TuneEvent

REDRAWS_PER_S = 5
PLAIN_EVERY_S = 10.0  # in a log file, one line at each new stage, and then one line this often


class Display:
    """Shows the events of a tune when they occur.

    Args:
        scope: The passes, problems and time limit of the tune.
        stream: A terminal gets the panel, any other stream gets lines. NO_COLOR disables colours.
        clock, every_s: The clock, and the seconds between two lines; other values for tests.
    """

    def __init__(
        self,
        scope: Scope | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = PLAIN_EVERY_S,
    ) -> None:
        self._stream = stream or sys.stdout
        self._clock = clock
        self.state = TuneState(scope or Scope(), clock())
        self._console = Console(file=self._stream, highlight=False)
        self._live: Live | None = None
        self._every_s = every_s
        self._last_line = -every_s
        self._shown: tuple[object, ...] = ()
        self._lock = threading.Lock()  # guards the state and the lines
        self._closed: threading.Event | None = None  # ends the thread of `_tick`

    def show(self, event: TuneEvent) -> None:
        """Show one event; cheap enough to be called for every trial."""
        now = self._clock()
        with self._lock:
            self.state.apply(event, now)
        if isinstance(event, ProblemStarted):
            for why, count in event.not_reused.items():
                self._console.print(
                    f"  {count} earlier trials are not used: {why}", markup=False, highlight=False
                )
            if event.timed_again:
                self._console.print(
                    f"  {event.timed_again} earlier trials could win and had no time on trained "
                    "inputs: timed again", markup=False, highlight=False,
                )
        if isinstance(event, PassDone):
            self.close()
        elif self._console.is_terminal:
            self._open_panel()
        else:
            with self._lock:
                self._line(now)
            if self._closed is None:
                self._closed = threading.Event()
                threading.Thread(target=self._tick, args=(self._closed,), daemon=True).start()

    def close(self) -> None:
        """Remove the panel, so that the next output begins on an empty line."""
        if self._closed is not None:
            with self._lock:  # a line that is being written is finished first
                self._closed.set()
            self._closed = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _open_panel(self) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=lambda: render(self.state, self._clock()),
                console=self._console,
                refresh_per_second=REDRAWS_PER_S,
                transient=True,
            )
            self._live.start(refresh=True)

    def _tick(self, closed: threading.Event) -> None:
        """Write lines also while no event occurs, because finals and certificates take minutes."""
        while not closed.wait(self._every_s / 5):
            with self._lock:
                if closed.is_set():
                    return
                try:
                    self._line(self._clock())
                except (OSError, ValueError):  # the reader is gone; the tune will notice
                    return

    def _line(self, now: float) -> None:
        """Write a line, unless the previous line is of the same stage and too recent."""
        progress = self.state.progress
        shown = (self.state.stage, progress and (progress.pass_name, progress.problem))
        if shown == self._shown and now - self._last_line < self._every_s:
            return
        self._shown, self._last_line = shown, now
        self._stream.write(plain_line(self.state, now) + "\n")
        self._stream.flush()


def plain_line(state: TuneState, now: float) -> str:
    """`[2/9] forward M64 N8 bf16  trial 57/160  best 3.14 us, 41 % of the floor  12 s left`."""
    progress = state.progress
    parts = []
    if progress is None:
        parts.append(stage_text(state))
    else:
        parts += [
            f"[{progress.index}/{progress.count}] {progress.pass_name} "
            f"{progress.name or progress.problem}",
            f"trial {progress.trials}/{progress.wanted}",
        ]
        if state.stage != "search":
            since = now - state.stage_started
            parts.append(stage_text(state) + (f", {spell_time(since)}" if since >= 1 else ""))
        parts.append(best_facts(state))
    if (left := state.seconds_left(now)) is not None:
        parts.append(f"{spell_time(left)} left")
    if progress is not None and (fates := spell_fates(progress.fates)):
        parts.append(f"({fates})")
    return "  ".join(filter(None, parts))


def render(state: TuneState, now: float) -> RenderableType:
    """The panel of four lines, which fit a terminal of 80 columns."""
    progress = state.progress
    left = state.seconds_left(now)
    rate = state.trials_per_s(now)
    done = state.share_done()
    lines: list[RenderableType] = [
        _line_of(
            _heading(state),
            f"{spell_time(now - state.started)} so far" if left is None
            else f"{spell_time(left)} left",
            "bold",
        ),
    ]
    if state.scope.problems:
        lines.append(_bar("all", done, f"{100 * done:.0f} %"))
    if progress is not None:
        of_problem = progress.trials / progress.wanted if progress.wanted else 0.0
        searching = state.stage == "search"
        text = stage_text(state) if searching else f"{progress.trials} trials"
        lines.append(_bar("search", min(1.0, of_problem), text))
        aside = f"{rate:.1f} trials/s" if rate is not None and searching else ""
        if not searching:
            aside = spell_time(now - state.stage_started)
        lines.append(_line_of(
            best_facts(state) if searching else stage_text(state), aside,
            "green" if searching else "cyan",
        ))
        lines.append(_line_of(spell_fates(progress.fates), "", "dim"))
    return Group(*lines)


def _heading(state: TuneState) -> str:
    progress = state.progress
    if progress is None:
        return stage_text(state)
    passes = list(state.scope.problems)
    which = f" ({passes.index(progress.pass_name) + 1}/{len(passes)})" if (
        progress.pass_name in passes and len(passes) > 1) else ""
    return (f"{progress.pass_name}{which} {progress.index}/{progress.count}  "
            f"{progress.name or progress.problem}")


def _line_of(text: str, aside: str, style: str) -> RenderableType:
    """A line with `text`, which is cut where it would meet `aside` at the right edge."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_row(Text(text, style=style), Text(aside, style="dim"))
    return grid


def _bar(name: str, share: float, text: str) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(width=6)
    grid.add_column(ratio=1)
    grid.add_column(width=16, justify="right", no_wrap=True)
    grid.add_row(Text(name), ProgressBar(total=1.0, completed=share), Text(text))
    return grid
