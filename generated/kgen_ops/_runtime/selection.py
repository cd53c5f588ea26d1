"""Choose the row of a dispatch table that serves a call.

The steps of dispatch, in order:
1. `exact`: the row that was tuned for this problem.
2. `learnt`: the row that a rule learnt from measurements chooses for these dtypes and compiled-in
   dims (`rules.py`).
3. The rows by how near their problems are to the call's, those first whose config is worth a trial
   for the call by the efficiency rules of the search space. Where a model was learnt from recorded
   searches, it ranks them, and nearness counts little (`ranking.py`):
   - `nearest`: the row's kernel has the call's dtypes and compiled-in dims and its conditions hold.
     It serves as it is. A kernel that does not round operands serves a call that allows it.
   - `family`: otherwise the row's config, changed where a rule demands it (`adaptation.py`), is
     rendered and compiled for the call (`families.py`). So are the configs that a search would try
     first, and those that won the nearest recorded searches.
4. `safe`: the operator's safe variant.

A kernel that cannot run on the device (it does not compile, or needs more than the device has)
leaves the call to the next row or step.

The table is that of the device's own model, or else of a GPU of the same architecture. No call
falls back to eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import NamedTuple, Protocol, TypeAlias

from .adaptation import (
    FIRST,
    MOST_CHANGES,
    NEXT_UNPROVEN,
    STEP,
    UNPROVEN,
    adapted,
    admitted,
    named_values,
    suits,
    with_values,
)
from .distance import problem_distance
from .errors import DispatchError
from .families import Instance, family_call
from .gpus import Table
from .launches import fits_device
from .problems import Explanation, problem_text
from .ranking import DISTANCE_WEIGHT, Ranking, Winner, features_of
from .rows import PREDICTED, Call, DispatchRule, Family, Gpu, Row, SafeRow, Value
from .rules import covering, evidence_text, first_fitting, path_text
from .signature import ROUNDS, PassSignature

# Rows whose configs are adapted to a call, the nearest first; and as many searches.
MOST_STARTS = 8
# How far a config is that a call may begin with, its values, and where it is from.
Start: TypeAlias = tuple[float, Family, tuple[Value, ...], "Row | Winner | None"]


class RowChoice(NamedTuple):
    """The row that serves a call, and the dispatch step that chose it."""

    step: str  # "exact", "learnt", "nearest", "family", "safe"
    # With step "family": the row whose config it began with; None for a config that no row holds.
    row: Row | SafeRow | None
    rule: DispatchRule | None = None  # only with step "learnt"
    instance: Instance | None = None  # only with step "family"
    ranking: Ranking | None = None  # with steps "nearest" and "family": the model that ranked it
    winner: Winner | None = None  # with step "family" and no row: the search that it began with

    @property
    def config(self) -> str:
        """The config that serves the call."""
        if self.instance is not None:
            return self.instance.config
        assert self.row is not None
        return self.row.config

    @property
    def is_predicted(self) -> bool:
        """Whether the kernel is that of a predicted row."""
        return self.instance is None and isinstance(self.row, Row) and self.row.is_predicted

    @property
    def is_unproven(self) -> bool:
        """Whether the kernel was never verified on a GPU: a family's, or a predicted row's."""
        return self.step == "family" or self.is_predicted

    @property
    def constants(self) -> tuple[str, ...]:
        """Dims compiled into the kernel."""
        if self.instance is not None:
            return self.instance.family.constants
        return self.row.constants if isinstance(self.row, Row) else ()


class Fallbacks(Protocol):
    """The loaders of the last dispatch steps."""

    def families(self) -> Mapping[str, Family]:
        """Return the families of the pass, by variant."""
        ...

    def safe_rows(self) -> Iterable[SafeRow]:
        """Return the safe kernels of the pass."""
        ...

    def ranking(self, gpu: Gpu) -> Ranking | None:
        """Return the model that ranks configs of the pass on a GPU; None if none was learnt."""
        ...


def candidates(
    signature: PassSignature, operator: str, table: Table, fallbacks: Fallbacks,
    dims: tuple[int, ...], dtypes: tuple[str, ...], call: Call,
) -> Iterator[RowChoice]:
    """Yield the rows that can serve a call, in the order of the dispatch steps.

    Args:
        signature: The signature of the pass.
        operator: The operator; for the error.
        table: The table of the device.
        fallbacks: Loads families and safe kernels; only steps 3 and 4 call it.
        dims: Extents, in the signature's order.
        dtypes: Dtypes and options, in the signature's order.
        call: The numbers that conditions of rows are evaluated on.
    Raises:
        DispatchError: If not even a safe kernel serves these dtypes.
    """
    names = [dim.name for dim in signature.dims]
    exact = [row for row in table.rows if row.dims == dims and row.dtypes == dtypes]
    yield from (RowChoice("exact", row) for row in exact if row.fits(call))
    # A call that allows rounded products may get a kernel that does not round them.
    plain = tuple(ROUNDS.get(name, name) for name in dtypes)
    for wanted in dict.fromkeys((dtypes, plain)):
        rule = covering(table.rules, dict(zip(names, dims, strict=True)), wanted)
        learnt = None if rule is None else first_fitting(rule, table.rows, call)
        if learnt is not None:
            yield RowChoice("learnt", learnt, rule)
    families = fallbacks.families()
    # The rows of other GPUs say nothing of how this one ranks configs.
    ranking = None
    if families and table.gpu is not None and not table.lent:
        ranking = fallbacks.ranking(table.gpu)
    yield from _promising(
        signature, operator, table, families, ranking, dims, dtypes, plain, call)
    for candidate in fallbacks.safe_rows():
        if candidate.dtypes == dtypes:
            yield RowChoice("safe", candidate)
            return
    problem = problem_text(signature, dims, dtypes)
    raise DispatchError(
        f"{signature.function}: the library has no kernel for {problem}\n"
        f"  run: kgen tune --op {operator} --problem {problem}"
    )


def _promising(
    signature: PassSignature, operator: str, table: Table, families: Mapping[str, Family],
    ranking: Ranking | None,
    dims: tuple[int, ...], dtypes: tuple[str, ...], plain: tuple[str, ...], call: Call,
) -> Iterator[RowChoice]:
    """Yield rows, and families with configs like those of rows, the most promising first."""
    choices = list(zip((field.name for field in signature.choices), dtypes, strict=True))
    names = [dim.name for dim in signature.dims]
    full_call = family_call(call, choices, table.facts)
    known = (*table.rows, *table.lent)
    far = {id(row): problem_distance(signature, dims, dtypes, row.dims, row.dtypes)
           for row in known}
    ranked: list[tuple[tuple[bool, bool, float], RowChoice]] = []
    seen: set[str] = set()
    instances: dict[str, tuple[tuple[bool, bool, float], RowChoice]] = {}
    starts: list[Start] = []
    for row in sorted(known, key=lambda row: far[id(row)]):
        family = families.get(_variant(row))
        values = None if family is None else named_values(family, row.config)
        compiled = (not table.lent and row.dtypes in (dtypes, plain)
                    and _same_constants(signature, row, dims))
        is_good = family is None or values is None or suits(family, values, full_call)
        if compiled and row.fits(call) and (
                family is None or values is None
                or fits_device(family, with_values(full_call, family, values))):
            rank = (family is not None and family.is_safe, not is_good, far[id(row)])
            ranked.append((rank, RowChoice("nearest", row)))
            seen.add(row.config)
            if is_good:
                continue
        if family is not None and values is not None and admitted(family, full_call):
            starts.append((far[id(row)], family, values, row))
    del starts[MOST_STARTS:]
    won = _won(signature, ranking, families, dims, dtypes, full_call)
    starts += won
    unproven = UNPROVEN
    for family in families.values():
        if family.is_safe:
            continue
        # A config that no row holds is as far as the nearest row of its variant, and more.
        near = min((far[id(row)] for row in known if _variant(row) == family.name), default=inf)
        if near == inf:
            near, unproven = unproven, unproven + NEXT_UNPROVEN
        starts += [(near + FIRST, family, values, None) for values in family.first]
    least = min((far for (_, bad, far), _ in ranked if not bad), default=inf)
    offered: set[str] = set()  # variants with a legal config
    for base, family, values, begun in sorted(starts, key=lambda start: start[0]):
        # What is farther than the best so far serves only if that fails: one config of a variant.
        changes = MOST_CHANGES if base < least or family.name not in offered else 0
        found = adapted(family, values, full_call, changes)
        if found is None or found.instance.config in seen:
            continue
        offered.add(family.name)
        cost = base + STEP * found.steps
        if found.suits and not family.is_safe:
            least = min(least, cost)
        rank = (family.is_safe, not found.suits, cost)
        config = found.instance.config
        # Several starts may end at one config: the nearest of them counts.
        if config not in instances or rank < instances[config][0]:
            choice = RowChoice("family", None, instance=found.instance)
            instances[config] = rank, (
                choice._replace(winner=begun) if isinstance(begun, Winner)
                else choice._replace(row=begun))
    ranked += instances.values()
    if ranking is not None:
        # Of a search of this very problem: no model knows better than it.
        fastest = {Instance(family, values).config for _, family, values, winner in won
                   if (winner.operator, winner.dims, winner.dtypes) == (operator, dims, dtypes)}
        ranked = [
            ((is_safe, is_bad, DISTANCE_WEIGHT * cost
              + (-inf if choice.config in fastest else ranking.predicted(_features(
                  choice, families, full_call, names, dims, choices)))),
             choice._replace(ranking=ranking))
            for (is_safe, is_bad, cost), choice in ranked
        ]
    yield from (choice for _, choice in sorted(ranked, key=lambda entry: entry[0]))


def _won(
    signature: PassSignature, ranking: Ranking | None, families: Mapping[str, Family],
    dims: tuple[int, ...], dtypes: tuple[str, ...], call: Call,
) -> list[tuple[float, Family, tuple[Value, ...], Winner]]:
    """The configs that won the nearest recorded searches; they were timed, not certified, and count
    as farther than the config of a row would."""
    found = []
    for winner in () if ranking is None else ranking.winners:
        family = families.get(winner.config.partition("(")[0])
        values = None if family is None else named_values(family, winner.config)
        if family is not None and values is not None and admitted(family, call):
            far = problem_distance(signature, dims, dtypes, winner.dims, winner.dtypes)
            found.append((far + FIRST, family, values, winner))
    return sorted(found, key=lambda start: start[0])[:MOST_STARTS]


def _features(
    choice: RowChoice, families: Mapping[str, Family], call: Call, names: Iterable[str],
    dims: tuple[int, ...], choices: Iterable[tuple[str, str]],
) -> dict[str, float]:
    """The numbers by which a choice is ranked; none if its config is not one of a family."""
    if choice.instance is not None:
        family, values = choice.instance
    else:
        assert isinstance(choice.row, Row)
        known = families.get(_variant(choice.row))
        read = None if known is None else named_values(known, choice.row.config)
        if known is None or read is None:
            return {}
        family, values = known, read
    return features_of(family, values, call, dict(zip(names, dims, strict=True)), dict(choices))


def _variant(row: Row) -> str:
    return row.config.partition("(")[0]


def _same_constants(signature: PassSignature, row: Row, dims: tuple[int, ...]) -> bool:
    return all(
        extent == tuned
        for dim, extent, tuned in zip(signature.dims, dims, row.dims, strict=True)
        if dim.name in row.constants
    )


def explanation(
    signature: PassSignature, table: Table, choice: RowChoice,
    dims: Mapping[str, int], dtypes: tuple[str, ...], where: str,
) -> Explanation:
    """Describe the chosen row and the evidence for it.

    Args:
        signature: The signature of the pass.
        table: The table that the row was chosen from.
        choice: One of `candidates`.
        dims: Extents by name, in the signature's order.
        dtypes: Dtypes and options, in the signature's order.
        where: Name of the device, used if no table's rows serve the call.
    """
    row = choice.row
    found = Explanation(
        function=signature.function,
        problem=problem_text(signature, tuple(dims.values()), dtypes),
        gpu=table.gpu.name if table.gpu else where,
        same_gpu=table.same_gpu or table.gpu is None,
        step=choice.step,
        config=choice.config,
        kernel=row.kernel if row is not None and choice.instance is None else "",
        evidence="correct for every problem, tuned for none",
        template=choice.instance.family.template if choice.instance else "",
        ranked_from=choice.ranking.problems if choice.ranking is not None else 0,
    )
    if isinstance(row, SafeRow):
        return found._replace(gpu=found.gpu if table.same_gpu else where, same_gpu=True)
    if choice.instance is not None:
        found = found._replace(evidence="family", begun=row.config if row is not None else "")
    if choice.winner is not None:
        found = found._replace(begun=choice.winner.config, tuned_problem=problem_text(
            signature, choice.winner.dims, choice.winner.dtypes))
    if row is None:
        return found
    of_family = f"family of a {PREDICTED} row" if row.is_predicted else found.evidence
    found = found._replace(
        evidence=of_family if choice.instance else row.evidence, record=row.record,
        median_us=row.median_us, tuned_problem=problem_text(signature, row.dims, row.dtypes),
    )
    if choice.rule is None:
        return found
    return found._replace(
        path=path_text(choice.rule, dims, row.record),
        learnt_from=evidence_text(choice.rule),
    )
