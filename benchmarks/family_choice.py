"""How good is the config that dispatch gives to a problem that has no row? From records, no GPU.

    python benchmarks/family_choice.py [--gpu h200] [--op wkv6]

Each problem of the committed journals that was searched is taken as if it had no row: the rows of
that problem are left out of the table, and dispatch chooses among the others. If the chosen config
was tried on the problem, its recorded time is compared with the best recorded one. Prints a line
per problem and the geometric mean per pass; `not tried` problems count in neither.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from math import exp, log
from pathlib import Path

from kgen.runtime.spelling import spell

GENERATED = Path(__file__).resolve().parents[1] / "generated"
Times = dict[str, float]  # config -> microseconds


def main() -> None:
    """Parse the options and print the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--op", help="one operator; default: all")
    options = parser.parse_args()
    sys.path.insert(0, str(GENERATED))
    losses: dict[str, list[float]] = defaultdict(list)
    for journal in sorted(GENERATED.glob(f"kgen_ops/*/reports/{options.gpu}.trials.jsonl")):
        operator = journal.parents[1].name
        if options.op in (None, operator):
            for pass_name, line, loss in compared(operator, options.gpu, journal):
                print(line)
                if loss is not None:
                    losses[f"{operator} {pass_name}"].append(loss)
    for name, found in losses.items():
        mean = exp(sum(log(1 + loss) for loss in found) / len(found)) - 1
        print(f"{name}: {len(found)} problems, mean loss {mean:.1%}, worst {max(found):.1%}")


def compared(operator: str, gpu: str, journal: Path) -> Iterator[tuple[str, str, float | None]]:
    """Yield (pass, line, loss) of each searched problem; the loss is None if it is not known."""
    package = importlib.import_module(f"kgen_ops.{operator}")
    selection = importlib.import_module("kgen_ops._runtime.selection")
    problems = importlib.import_module("kgen_ops._runtime.problems")
    for (pass_name, problem), times in sorted(recorded(journal).items()):
        if len(times) < 20:
            continue  # not searched
        passed = getattr(package, pass_name.upper())
        signature = passed.signature
        fields = dict(pair.split("=") for pair in problem.split(","))
        dims = {d.name: int(fields.get(d.name, 0)) for d in signature.dims}
        names = tuple(fields.get(f.name, "") for f in signature.choices)
        (profile,) = [known for known in passed.tables.gpus() if known.name == gpu]
        table = passed.tables.of_gpu(profile, True, profile.facts)
        rows = tuple(row for row in table.rows
                     if (row.dims, row.dtypes) != (tuple(dims.values()), names))
        found = next(selection.candidates(
            signature, operator, table._replace(rows=rows, rules=()), passed.tables,
            tuple(dims.values()), names, problems.contiguous_call(signature, dims)))
        best = min(times.values())
        taken = times.get(found.config)
        loss = None if taken is None else taken / best - 1
        shown = "not tried" if loss is None else f"{loss:+.1%}"
        yield pass_name, (f"{operator} {pass_name} {problem}\n  {found.step}: {found.config}\n  "
                          f"{shown}, best {best:.2f} us of {len(times)} configs"), loss


def recorded(journal: Path) -> dict[tuple[str, str], Times]:
    """Times by config, of each (pass, problem)."""
    times: dict[tuple[str, str], Times] = defaultdict(dict)
    for line in journal.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("time_us") and record["fate"] == "verified":
            values = ", ".join(f"{name}={spell(value)}"
                               for name, value in record["config"].items())
            config = f"{record['variant']}({values})"
            times[record["pass"], record["problem"]][config] = record["time_us"][0]
    return times


if __name__ == "__main__":
    main()
