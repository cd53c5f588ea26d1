"""The display of a running tune: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from kgen.model.record import Fate
from kgen.tune import Progress

REDRAW_S = 0.1  # a terminal takes no more than this from the tune
PLAIN_EVERY_S = 10.0  # in a log file, one line per problem and this often between


class Display:
    """Shows `Progress` values as they come."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._last = 0.0
        self._shown: tuple[str, str] | None = None
        self._open = False

    def __call__(self, progress: Progress) -> None:
        """Show one state; cheap enough to be called after every trial."""
        now = time.monotonic()
        stage = (progress.problem, progress.stage)
        new_stage, self._shown = stage != self._shown, stage
        if progress.stage == "done":
            self._end_line()
            return
        if not new_stage and now - self._last < (REDRAW_S if self._live else PLAIN_EVERY_S):
            return
        self._last = now
        if self._live:
            columns = shutil.get_terminal_size().columns
            self._stream.write("\r\x1b[K" + describe(progress)[: columns - 1])
            self._open = True
        else:
            self._stream.write(describe(progress) + "\n")
        self._stream.flush()

    def _end_line(self) -> None:
        if self._open:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._open = False


def describe(progress: Progress) -> str:
    """`[2/9] M=64,N=4096  trial 57/160  best 3.1 us, 41 % of the floor  (52 verified, 5 wrong)`."""
    if progress.stage == "safe":
        return "verifying the safe variant for every combination of dtypes"
    if progress.stage == "host runs":
        return "running the winners' sources on the CPU, sanitized and in other thread orders"
    parts = [
        f"[{progress.index}/{progress.count}] {progress.problem}",
        f"trial {progress.trials}/{progress.wanted}",
    ]
    # What matters most comes first: a terminal of 80 columns cuts the rest.
    if progress.best_us is not None:
        share = f", {100 * progress.share:.0f} % of the floor" if progress.share else ""
        parts.append(f"best {progress.best_us:.4g} us{share}")
    if progress.seconds_left is not None:
        parts.append(f"{progress.seconds_left:.0f} s left")
    fates = [
        f"{progress.fates[fate]} {fate.value.replace('_', ' ')}"
        for fate in Fate
        if progress.fates.get(fate)
    ]
    if fates:
        parts.append(f"({', '.join(fates)})")
    if progress.stage == "finals":
        parts.append("certifying and comparing the finalists")
    return "  ".join(parts)
