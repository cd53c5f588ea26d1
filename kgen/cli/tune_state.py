"""The progress of a tune, computed from its events; the display shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kgen.model.record import Fate, Record
from kgen.model.units import format_us
from kgen.tune import (
    PassDone,
    PassResult,
    ProblemConfirmed,
    ProblemStarted,
    Progress,
    SafeCertified,
    StageAdvanced,
    StageStarted,
    TrialRecorded,
    TuneEvent,
)

_RATE_OVER_S = 20.0  # the rate of trials is an average over this time

_REASON_LINES = 16
_MISSING = 6  # combinations of dtypes that a message names


@dataclass(frozen=True, slots=True)
class PeerTime:
    """The fastest peer of a problem in an earlier report, microseconds."""

    name: str
    median_us: float


@dataclass(frozen=True)
class Scope:
    """The passes, problems and time limit of a tune.

    Attributes:
        title: Operator and GPU.
        problems: Number of problems by pass, in the order of the passes.
        time_s: Seconds for the whole command; None for no limit.
        peers: Fastest peers in an earlier report, by pass and short name of the problem.
    """

    title: str = ""
    problems: Mapping[str, int] = field(default_factory=dict)
    time_s: float | None = None
    peers: Mapping[tuple[str, str], PeerTime] = field(default_factory=dict)


@dataclass
class TuneState:
    """The progress of a tune.

    Attributes:
        scope: The passes, problems and time limit of the tune.
        started: Start of the tune on the clock `time.monotonic`.
        progress: Progress of the problem that is searched; None before the first problem.
        stage: `search`, `finals`, `safe` or `host runs`.
        stage_started: Start of the stage on the same clock.
        confirmed: Number of problems of the present pass whose winners are confirmed.
        passes_done: Number of passes that are done.
        advanced: Progress of the stage, if the stage reports it.
        certified: Certified results of the present pass, once a problem is confirmed.
    """

    scope: Scope
    started: float
    progress: Progress | None = None
    stage: str = "search"
    stage_started: float = 0.0
    confirmed: int = 0
    passes_done: int = 0
    advanced: StageAdvanced | None = None
    certified: PassResult | None = None
    _over: Progress | None = None  # the last progress of the pass that is done
    _share_seen: float = 0.0  # the greatest share so far; `_share_after_s` is when it was reached
    _share_after_s: float = 0.0
    _trials_at: list[float] = field(default_factory=list)
    _fates: dict[tuple[str, str], Counter[Fate]] = field(default_factory=dict)
    _reasons: dict[tuple[str, str], str] = field(default_factory=dict)

    def apply(self, event: TuneEvent, now: float) -> None:
        """Update the state from an event."""
        stage = self.stage
        match event:
            case ProblemStarted(progress):
                self.progress, stage = progress, "search"
            case TrialRecorded(record, progress):
                self.progress, stage = progress, "search"
                self._trials_at.append(now)
                self._note(record)
            case StageStarted(stage, progress):
                self.progress = progress or self.progress
                self.advanced = None
            case StageAdvanced():
                self.advanced = event
            case ProblemConfirmed(so_far):
                self.confirmed = len(so_far.results)
                self.certified = so_far
            case SafeCertified(so_far):
                self.certified = so_far
            case PassDone():
                self.certified = None
                self.passes_done += 1
                self.confirmed = 0
                self._over = self.progress
        if stage != self.stage or isinstance(event, ProblemStarted):
            self.stage, self.stage_started = stage, now
        if (share := self.share_done()) > self._share_seen:
            self._share_seen, self._share_after_s = share, now - self.started

    def _note(self, record: Record) -> None:
        key = (record.pass_name, record.config.variant)
        self._fates.setdefault(key, Counter())[record.fate] += 1
        if record.reason:
            self._reasons.setdefault(key, record.reason)

    def trials_per_s(self, now: float) -> float | None:
        """Trials per second of the search over the last seconds; None before the second trial."""
        recent = [t for t in self._trials_at if now - t <= _RATE_OVER_S]
        since = max(self.started, now - _RATE_OVER_S, self.stage_started)
        return len(recent) / (now - since) if len(recent) > 1 and now > since else None

    def share_done(self) -> float:
        """Share of the whole command's problems that is done, 0 to 1.

        The present problem counts in part, by its trials.
        """
        whole = sum(self.scope.problems.values())
        if not whole:
            return 0.0
        before = sum(list(self.scope.problems.values())[: self.passes_done])
        if self.progress is self._over or self.passes_done == len(self.scope.problems):
            return before / whole
        progress = self.progress
        assert progress is not None  # `_over` is None before the first pass
        of_problem = min(1.0, progress.trials / progress.wanted) if progress.wanted else 0.0
        if self.stage != "search":
            of_problem = 1.0
        return min(1.0, (before + progress.index - 1 + of_problem) / whole)

    def seconds_left(self, now: float) -> float | None:
        """Time left for the whole command at its speed so far; None while too little is known.

        Finals and certificates do not add to the share that is done. Meanwhile the estimate of the
        time left goes down; when it reaches 0, the time left is unknown.
        """
        share, spent = self.share_done(), now - self.started
        by_share = None
        # When all problems are searched, only host runs are left, whose time is unknown.
        if 0.01 < share < 1 and spent > 3 and self._share_seen:
            by_share = self._share_after_s / self._share_seen - spent
            by_share = by_share if by_share > 0 else None
        limit = self.scope.time_s
        if limit is None or share == 1:
            return by_share
        by_limit = max(0.0, limit - spent)
        return by_limit if by_share is None else min(by_limit, by_share)

    def peer(self) -> PeerTime | None:
        """The fastest peer of the present problem, from an earlier report."""
        if self.progress is None:
            return None
        return self.scope.peers.get((self.progress.pass_name, self.progress.name))

    def missing_text(self) -> str:
        """A text about the safe kernels that a tune which ended early has left out, or empty."""
        found = self.certified
        if found is None or not found.safe_missing:
            return ""
        count, missing = len(found.safe), [_spelled(one) for one in found.safe_missing]
        more = f"\n  and {len(missing) - _MISSING}" if len(missing) > _MISSING else ""
        return (
            f"{found.pass_name}: the library has the safe kernels of {count} of "
            f"{count + len(missing)} combinations of dtypes; the same command certifies the "
            "others:\n  " + "\n  ".join(missing[:_MISSING]) + more
        )

    def dead_variants(self) -> list[str]:
        """A line for each variant that was tried without a verified trial."""
        lines = []
        for (pass_name, variant), fates in self._fates.items():
            if not fates[Fate.VERIFIED]:
                why = self._reasons.get((pass_name, variant), "no reason recorded")
                lines.append(f"variant {variant} of {pass_name}: none of {fates.total()} trials "
                             f"was verified; the first: {_indented(why)}")
        return lines


def _spelled(dtypes: Mapping[str, str]) -> str:
    return ",".join(f"{name}={dtype}" for name, dtype in dtypes.items())


def _indented(reason: str) -> str:
    """A reason, indented. A long one loses its middle, because its end names the source."""
    lines = reason.splitlines()
    if len(lines) > _REASON_LINES:
        lines = [*lines[: _REASON_LINES - 2], "...", lines[-1]]
    return "\n    ".join(lines)


def spell_fates(fates: Mapping[Fate, int]) -> str:
    """Counts by fate, verified first: `52 verified, 5 wrong`."""
    order = sorted(Fate, key=lambda fate: fate is not Fate.VERIFIED)
    return ", ".join(f"{fates[f]} {f.value.replace('_', ' ')}" for f in order if fates.get(f))


def spell_time(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def best_facts(state: TuneState) -> str:
    """`best 3.14 us, 41 % of the floor, 1.32x liger`; empty without a verified trial."""
    progress = state.progress
    if progress is None or progress.best_us is None:
        return ""
    parts = [f"best {format_us(progress.best_us)} us"]
    if progress.share:
        parts.append(f"{100 * progress.share:.0f} % of the floor")
    if (peer := state.peer()) is not None:
        parts.append(f"{peer.median_us / progress.best_us:.2f}x {peer.name}")
    return ", ".join(parts)


def stage_text(state: TuneState) -> str:
    """The present stage of the tune, with its counter."""
    progress = state.progress
    if progress is None:
        return "preparing: spaces, device, first builds"
    of = state.scope.problems.get(progress.pass_name, progress.count)
    match state.stage:
        case "finals":
            return "certifying and comparing the finalists"
        case "safe":
            return f"verifying the safe variant of every dtype{_so_far(state.advanced)}"
        case "host runs" if state.confirmed == of:
            return "running the safe variant of every dtype on the CPU"
        case "host runs":
            return f"running winners on the CPU, {state.confirmed} of {of} confirmed"
        case _:
            return f"trial {progress.trials}/{progress.wanted}"


def _so_far(advanced: StageAdvanced | None) -> str:
    if advanced is None:
        return ""
    of = f" of {advanced.count}" if advanced.count else ""
    return f", {advanced.done}{of} {advanced.what}"
