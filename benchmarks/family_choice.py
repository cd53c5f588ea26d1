"""How good is the config that dispatch chooses for a problem without a row? Needs no GPU.

    python benchmarks/family_choice.py [--gpu h200] [--table h200] [--op wkv6] [--library FOLDER]
        [--each]

Each problem that was searched on --gpu is treated as if it had no row: its rows are removed from
the table and its records from the data of the ranking model. Dispatch then chooses among the other
rows, once by distance alone and once by the model. --table names the GPU whose rows are used, for a
GPU without a table of its own. The loss of a config is its recorded time over the problem's best
time, minus 1. For each pass, the geometric mean and the worst loss of both ways are printed

- `both tried`: over the problems on which both chosen configs were tried;
- `first tried`: with the first config of each order that was tried on the problem, if there is one.
"""

from __future__ import annotations

import argparse
import importlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

from kgen.catalogue import Catalogue, Entry, open_catalogue
from kgen.emit import PACKAGE, LoadedLibrary
from kgen.predict import ranking_from, samples
from kgen.predict.observations import Searched, read_searches
from kgen.runtime.adaptation import named_values
from kgen.runtime.families import Instance
from kgen.runtime.problems import contiguous_call
from kgen.runtime.ranking import Ranking

GENERATED = Path(__file__).resolve().parents[1] / "generated"
LEAST_CONFIGS = 20  # timed configs from which on a problem counts as searched
Losses = list[float | None]  # loss of each config in dispatch order; None: not tried


@dataclass(frozen=True)
class Fallbacks:
    """The data that dispatch loads for a pass, with a model that has not seen the problem."""

    tables: Any
    model: Ranking | None

    def families(self) -> Any:
        return self.tables.families()

    def safe_rows(self) -> Any:
        return self.tables.safe_rows()

    def ranking(self, _: object) -> Ranking | None:
        return self.model


def main() -> None:
    """Parse the options and print the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--table", help="the GPU whose rows serve (default: --gpu)")
    parser.add_argument("--op", help="one operator; default: all")
    parser.add_argument("--library", type=Path, default=GENERATED)
    parser.add_argument("--each", action="store_true", help="a line per problem as well")
    options = parser.parse_args()
    catalogue = open_catalogue([])
    with LoadedLibrary.open(options.library, "--library") as library:
        for folder in sorted(library.folder.glob("*/safe.yaml")):
            if options.op in (None, folder.parent.name):
                compared(library, catalogue, catalogue.entry(folder.parent.name), options)


def compared(
    library: LoadedLibrary, catalogue: Catalogue, entry: Entry, options: argparse.Namespace
) -> None:
    """Print the losses of an operator."""
    name = entry.operator.name
    gpus = [gpu for gpu in library.tuned(name) if gpu.name == (options.table or options.gpu)]
    found: dict[str, list[tuple[Losses, Losses]]] = defaultdict(list)
    known: dict[str, Any] = {}
    for searched in read_searches(entry, options.library) if gpus else ():
        if searched.gpu.name != options.gpu or len(searched.observations) < LEAST_CONFIGS:
            continue
        pass_name = searched.pass_name
        if pass_name not in known:
            known[pass_name] = samples(library, catalogue, entry, pass_name, gpus[0])
        others = [one for one in known[pass_name]
                  if (one.operator, one.problem) != (name, searched.problem)]
        model = ranking_from(others) if len(others) > 1 else None
        near, by_model = (list(losses(library, searched, gpus[0], m)) for m in (None, model))
        found[pass_name].append((near, by_model))
        if options.each:
            print(f"{name} {pass_name} {searched.problem}: {shown(near)}, {shown(by_model)}")
    for pass_name, pairs in found.items():
        print(f"{name} {pass_name}: {len(pairs)} problems, top tried "
              f"{sum(a[0] is not None for a, _ in pairs)} by distance, "
              f"{sum(b[0] is not None for _, b in pairs)} by the model")
        both = [(a[0], b[0]) for a, b in pairs if a[0] is not None and b[0] is not None]
        print(f"  both tried   {summary(both)}")
        firsts = [(first(a), first(b)) for a, b in pairs]
        print(f"  first tried  {summary([(a, b) for a, b in firsts if None not in (a, b)])}",
              flush=True)


def losses(
    library: LoadedLibrary, searched: Searched, gpu: Any, model: Ranking | None
) -> Iterator[float | None]:
    """Yield the loss of each config that dispatch would take, in dispatch's order."""
    passed = library.passed(searched.operator, searched.pass_name)
    problem, families = searched.problem, passed.tables.families()
    times: dict[str, float] = {}
    for seen in searched.observations:
        times[spelled(families, seen.config.label)] = seen.median_us
    dims = tuple(extent for _, extent in problem.dims)
    names = tuple(choice for _, choice in problem.dtypes)
    table = passed.tables.of_gpu(gpu, True, gpu.facts)
    rows = tuple(row for row in table.rows if (row.dims, row.dtypes) != (dims, names))
    selection = importlib.import_module(f"{PACKAGE}._runtime.selection")
    for choice in selection.candidates(
        passed.signature, searched.operator, table._replace(rows=rows, rules=()),
        Fallbacks(passed.tables, model), dims, names,
        contiguous_call(passed.signature, dict(problem.dims)),
    ):
        taken = times.get(spelled(families, choice.config))
        yield None if taken is None else taken / searched.best_us - 1


def spelled(families: Any, config: str) -> str:
    """A config as its family spells it today, including parameters that older records lack."""
    family = families.get(config.partition("(")[0])
    values = None if family is None else named_values(family, config)
    return config if family is None or values is None else Instance(family, values).config


def first(found: Losses) -> float | None:
    """The first loss that is known."""
    return next((loss for loss in found if loss is not None), None)


def shown(found: Losses) -> str:
    """The loss of the first config."""
    return "not tried" if not found or found[0] is None else f"{found[0]:+.1%}"


def summary(pairs: list[tuple[Any, Any]]) -> str:
    """Mean and worst loss by distance and by the model."""
    if not pairs:
        return "none"
    told = [f"mean {exp(sum(log(1 + loss) for loss in each) / len(each)) - 1:.1%}, "
            f"worst {max(each):.1%}" for each in zip(*pairs, strict=True)]
    return f"{len(pairs)}: {told[0]} by distance; {told[1]} by the model"


if __name__ == "__main__":
    main()
