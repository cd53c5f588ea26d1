"""Every mutant of every subject, and the fate that a certificate must give it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mutation_excuses import EXCUSES
from mutation_operators import OPERATORS, Fate, MutationOperator, edits_of
from mutation_subjects import SUBJECTS, Subject

from kgen.assets import include_dir


@dataclass(frozen=True)
class Mutant:
    """One change of one text, or of the launch.

    Attributes:
        name: `ring / drop wait / kgen::cp_async_wait<kStages - 1>();`, with `#2` if it recurs.
        subject: The kernel that is mutated.
        operator: The mutation operator that made the mutant.
        edit: Index of the operator's edit, or of its change of a plan.
        header: The header that is changed; empty for the rendered source.
        text: The whole changed text; empty if the launch is changed.
        plan: How the launch is changed; empty if the text is changed.
        fate: The fate that a certificate must give the mutant.
        why: Reason of a fate other than refused.
        by_default: Whether a default run of the tests includes the mutant.
    """

    name: str
    subject: Subject
    operator: MutationOperator
    edit: int
    header: str
    text: str
    plan: str
    fate: Fate
    why: str
    by_default: bool = False


SAME_CODE = Path(__file__).with_name("same_code.txt")
"""Names of mutants that compile to the same module as the unmutated kernel, because they change
code of another config. `KGEN_UPDATE_GOLDEN=1 pytest tests/mutation -m slow -k same_code` rewrites
the file."""


def mutants() -> list[Mutant]:
    """All mutants, in a fixed order, with their fates."""
    unchanged = set(SAME_CODE.read_text(encoding="utf-8").splitlines())
    found = []
    for subject in SUBJECTS:
        for mutant in _of_subject(subject):
            for excuse in EXCUSES:
                if excuse.covers(mutant.name):
                    mutant = replace(mutant, fate=excuse.fate, why=excuse.why)
            # A change in code that the host layer leaves out is harmful nevertheless.
            if mutant.name in unchanged and mutant.fate is not Fate.UNSEEN:
                mutant = replace(mutant, fate=Fate.SAME_CODE, why="not compiled in this config")
            found.append(mutant)
    chosen = set(_one_of_each_edit(found))
    return [replace(m, by_default=m.name in chosen) for m in found]


def _one_of_each_edit(found: list[Mutant]) -> Iterator[str]:
    """Names of the mutants run by default: one per edit, if possible harmful, of all subjects."""
    by_edit: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in found:
        by_edit.setdefault((mutant.operator.name, mutant.edit), []).append(mutant)
    for turn, choices in enumerate(by_edit.values()):
        harmful = [m for m in choices if m.fate is Fate.REFUSED]
        choices = harmful or [m for m in choices if m.fate is not Fate.SAME_CODE] or choices
        yield choices[turn * len(choices) // len(by_edit)].name


def _of_subject(subject: Subject) -> Iterator[Mutant]:
    texts = {"": subject.render().source}
    texts |= {h: (include_dir() / h).read_text(encoding="utf-8") for h in subject.headers}
    seen: Counter[str] = Counter()
    columns = "kN" if "N" in subject.space.constants else "N"
    for operator in OPERATORS:
        for header, text in texts.items():
            for number, start, end, new in edits_of(operator, text, columns):
                where = f"{header}: " if header else ""
                what = where + _shown(text, start, end, new)
                seen[f"{operator.name} {what}"] += 1
                if (count := seen[f"{operator.name} {what}"]) > 1:
                    what += f" #{count}"
                yield Mutant(
                    f"{subject.name} / {operator.name} / {what}",
                    subject, operator, number, header, text[:start] + new + text[end:], "",
                    operator.fate, operator.why,
                )  # fmt: skip
        for number, change in enumerate(operator.plan):
            if change == "less shared memory" and subject.space.launches[0].smem.text == "0":
                continue
            yield Mutant(
                f"{subject.name} / {operator.name} / {change}",
                subject, operator, number, "", "", change, operator.fate, operator.why,
            )  # fmt: skip


def _shown(text: str, start: int, end: int, new: str) -> str:
    """The change, shown within its line."""
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    before = text[max(line_start, start - 24) : start]
    after = text[end : min(line_end, end + 16)]
    return re.sub(r"\s+", " ", f"{before}[{text[start:end]} => {new}]{after}").strip()
