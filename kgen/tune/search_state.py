"""The state of one problem's search: the records so far and their totals."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kgen.model.config import Config
from kgen.model.record import Fate, Record

_MAX_REASON_LINES = 16


@dataclass
class SearchState:
    """Running totals of one problem's search.

    Attributes:
        records: The newest record of each config.
        fates: Number of trials by fate.
        reasons: Number of refused trials by the headline of their reason.
        examples: One complete reason for each headline.
        compile_s: Seconds of compilation, summed over threads.
        new_trials: Trials of this run; the journal already held the others.
        timed_again: Records of earlier tunes that lacked the time on trained inputs and got it.
        options: Options of the commands that reproduce a trial: ` --path ... --out ...`.
    """

    records: dict[Config, Record] = field(default_factory=dict)
    fates: Counter[Fate] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    compile_s: float = 0.0
    new_trials: int = 0
    timed_again: int = 0
    options: str = ""

    def add(self, record: Record) -> None:
        """Count a record."""
        self.records[record.config] = record
        self.fates[record.fate] += 1
        if record.reason:
            headline = f"{record.fate}: {_headline(record.reason)}"
            self.reasons[headline] += 1
            self.examples.setdefault(headline, record.reason + self._reproduce(record))

    def certify(self, trial: Record, certificate: Record) -> None:
        """Replace a trial's record by its certificate."""
        if certificate.fate is Fate.VERIFIED:
            self.records[certificate.config] = certificate
        else:
            self.fates[trial.fate] -= 1
            self.add(certificate)

    def ranking(self) -> list[Record]:
        """Verified records, fastest first; ties by config for a stable order."""
        timed = [
            (r.timing.median_us, r)
            for r in self.records.values()
            if r.fate is Fate.VERIFIED and r.timing
        ]
        ties = Counter(us for us, _ in timed)

        def place(item: tuple[float, Record]) -> tuple[float, str]:
            us, record = item
            return us, record.config.digest if ties[us] > 1 else ""  # computing one takes 40 us

        return [r for _, r in sorted(timed, key=place)]

    @property
    def best_us(self) -> float | None:
        """Best time so far."""
        ranking = self.ranking()
        return ranking[0].timing.median_us if ranking and ranking[0].timing else None

    def _reproduce(self, record: Record) -> str:
        if record.fate is Fate.BUILD_FAILED:
            return ""  # the compiler's message names the source
        return (
            f"\nreproduce: kgen verify --op {record.operator} --pass {record.pass_name} "
            f"--gpu {record.gpu}{self.options} --record {record.id}"
        )

    def why_nothing_verified(self) -> str:
        """The most frequent reasons of refusal, the first of them in full."""
        text = "\n".join(f"  {count} x {text}" for text, count in self.reasons.most_common(5))
        if not self.reasons:
            return text
        lines = self.examples[self.reasons.most_common(1)[0][0]].splitlines()
        if len(lines) > _MAX_REASON_LINES:
            lines = [*lines[: _MAX_REASON_LINES - 2], "...", lines[-1]]
        return text + "\n  for instance:\n" + "\n".join(f"    {line}" for line in lines)


def _headline(reason: str) -> str:
    """A compiler's first error, else the first line."""
    lines = reason.splitlines()
    return next((line[line.index("error:") :] for line in lines if "error:" in line), lines[0])
