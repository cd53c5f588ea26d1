"""The table of docs/verification.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mutation_operators import OPERATORS

DOCUMENT = Path(__file__).parents[2] / "docs" / "verification.md"
HEAD = "| mutation | refused | equivalent | unseen | same code | refused by |"


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Lay out (operator, fate, mechanism) of each mutant as Markdown, a row per operator."""
    lines = [HEAD, "|---|---|---|---|---|---|"]
    run = {operator for operator, _, _ in rows}
    for operator in [*(o.name for o in OPERATORS if o.name in run), "all"]:
        own = [row for row in rows if operator in (row[0], "all")]
        fates = Counter(fate for _, fate, _ in own)
        mechanisms = Counter(mechanism for _, _, mechanism in own if mechanism)
        told = ", ".join(f"{name} {count}" for name, count in mechanisms.most_common())
        lines.append(
            f"| {operator} | {fates['refused']} | {fates['equivalent']} | {fates['unseen']} "
            f"| {fates['same code']} | {told or '-'} |"
        )
    return "\n".join(lines)


def documented() -> dict[str, tuple[int, int, int, int]]:
    """Read (refused, equivalent, unseen, same code) of each row of the document's table."""
    _, _, after = DOCUMENT.read_text(encoding="utf-8").partition(HEAD + "\n")
    found = {}
    for line in after.splitlines()[1:]:
        if not line.startswith("|"):
            break
        name, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
        a, b, c, d = (int(number) for number in numbers[:4])
        found[name] = (a, b, c, d)
    return found
