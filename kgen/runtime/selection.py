"""Choose the row of a dispatch table that serves a call.

The steps of dispatch, in order:
1. `exact`: the row that was tuned for this problem.
2. `learnt`: the row that a rule, learnt from measurements, chooses for these dtypes and compiled-in
   dims (`rules.py`).
3. All rows, ordered by the distance of their problems from the call's. Rows whose config obeys the
   efficiency rules of the search space at the call come first. If a model was learnt from recorded
   searches, it ranks the rows, and distance has little weight (`ranking.py`):
   - `nearest`: the row's kernel has the call's dtypes and compiled-in dims, and its conditions
     hold. It serves unchanged. If a call allows rounded operands, a kernel that does not round them
     may serve it, too.
   - `family`: otherwise the row's config, changed where a rule demands it (`adaptation.py`), is
     rendered and compiled for the call (`families.py`). The same is done with the configs that a
     search would try first, and with the winners of the nearest recorded searches.
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
    FamilyRules,
    named_values,
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

# Most rows whose configs are adapted to a call, the nearest first; and most recorded searches.
MOST_STARTS = 8


class Start(NamedTuple):
    """A config that may be adapted to a call.

    Attributes:
        far: Distance of the config's problem from the call's.
        rules: The rules of the config's variant at the call.
        values: The config's values.
        begun: The origin of the config: a row, a search, or None.
    """

    far: float
    rules: FamilyRules
    values: tuple[Value, ...]
    begun: Row | Winner | None


class RowChoice(NamedTuple):
    """The row that serves a call, and the dispatch step that chose it."""

    step: str  # "exact", "learnt", "nearest", "family", "safe"
    # With step "family": the row whose config was adapted; None for a config that no row holds.
    row: Row | SafeRow | None
    rule: DispatchRule | None = None  # only with step "learnt"
    instance: Instance | None = None  # only with step "family"
    ranking: Ranking | None = None  # with steps "nearest" and "family": the model that ranked it
    winner: Winner | None = None  # with step "family" and no row: the search whose winner was used

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
    # A device that only has rows of other GPUs has no model of its own.
    ranking = None
    if families and table.gpu is not None and not table.lent:
        ranking = fallbacks.ranking(table.gpu)
    choices = zip((field.name for field in signature.choices), dtypes, strict=True)
    full = family_call(call, choices, table.facts)
    rules = {name: FamilyRules(family, full) for name, family in families.items()}
    yield from _promising(
        _Request(signature, dims, dtypes, plain, call, rules), table, ranking, operator)
    for candidate in fallbacks.safe_rows():
        if candidate.dtypes == dtypes:
            yield RowChoice("safe", candidate)
            return
    problem = problem_text(signature, dims, dtypes)
    raise DispatchError(
        f"{signature.function}: the library has no kernel for {problem}\n"
        f"  run: kgen tune --op {operator} --problem {problem}"
    )


class _Request(NamedTuple):
    """The request of a call.

    Attributes:
        signature: The signature of the pass.
        dims: Extents, in the signature's order.
        dtypes: Dtypes and options, in the signature's order.
        plain: The same with dtypes that do not round products.
        call: The numbers that conditions of rows are evaluated on.
        families: The families of the pass at the call, by variant.
    """

    signature: PassSignature
    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    plain: tuple[str, ...]
    call: Call
    families: Mapping[str, FamilyRules]

    def config(self, label: str) -> tuple[FamilyRules, tuple[Value, ...]] | None:
        """Read the config of a row or of a search; None if it does not belong to a family."""
        rules = self.families.get(label.partition("(")[0])
        values = None if rules is None else named_values(rules.family, label)
        return None if rules is None or values is None else (rules, values)

    def distance(self, other: Row | Winner) -> float:
        """The distance from the problem of a row or of a search."""
        return problem_distance(self.signature, self.dims, self.dtypes, other.dims, other.dtypes)

    def may_serve(self, row: Row) -> bool:
        """Whether the kernel of a row has the dtypes and compiled-in dims of this call."""
        return row.dtypes in (self.dtypes, self.plain) and row.fits(self.call) and all(
            extent == tuned
            for dim, extent, tuned in zip(self.signature.dims, self.dims, row.dims, strict=True)
            if dim.name in row.constants
        )


# Sort key of a choice: (is the safe variant, breaks a rule of efficiency, cost).
_Rank: TypeAlias = tuple[bool, bool, float]


def _promising(request: _Request, table: Table, ranking: Ranking | None, operator: str
               ) -> Iterator[RowChoice]:
    """Yield rows, and families with configs like those of rows, the most promising first."""
    known = [(request.distance(row), row) for row in (*table.rows, *table.lent)]
    known.sort(key=lambda entry: entry[0])
    rows, starts = _of_rows(request, known, is_lent=bool(table.lent))
    won = _won(request, ranking)
    starts += won
    starts += _unproven(request, known)
    ranked = rows + _instances(rows, starts)
    if ranking is not None:
        # A recorded search of this very problem is better evidence than the model.
        this = (operator, request.dims, request.dtypes)
        fastest = {Instance(start.rules.family, start.values).config for start in won
                   if isinstance(start.begun, Winner) and start.begun.problem == this}
        predicted = ranking.predicted([_features(request, choice) for _, choice in ranked])
        ranked = [
            ((is_safe, is_bad, -inf if choice.config in fastest else DISTANCE_WEIGHT * cost + ln),
             choice._replace(ranking=ranking))
            for ((is_safe, is_bad, cost), choice), ln in zip(ranked, predicted, strict=True)
        ]
    yield from (choice for _, choice in sorted(ranked, key=lambda entry: entry[0]))


def _of_rows(
    request: _Request, known: Iterable[tuple[float, Row]], *, is_lent: bool
) -> tuple[list[tuple[_Rank, RowChoice]], list[Start]]:
    """Return the rows that serve unchanged, and the configs of the nearest other rows.

    Args:
        request: The call.
        known: The rows with their distances, the nearest first.
        is_lent: Whether they were tuned for another GPU, so that none serves unchanged.
    """
    ranked: list[tuple[_Rank, RowChoice]] = []
    starts: list[Start] = []
    for far, row in known:
        serves = not is_lent and request.may_serve(row)
        if not serves and len(starts) >= MOST_STARTS:
            continue
        found = request.config(row.config)
        if found is None:
            if serves:
                ranked.append(((False, False, far), RowChoice("nearest", row)))
            continue
        rules, values = found
        if serves and fits_device(rules.family, rules.call_of(values)):
            is_good = rules.suits(values)
            rank = (rules.family.is_safe, not is_good, far)
            ranked.append((rank, RowChoice("nearest", row)))
            if is_good:
                continue
        if rules.admits:
            starts.append(Start(far, rules, values, row))
    return ranked, starts[:MOST_STARTS]


def _won(request: _Request, ranking: Ranking | None) -> list[Start]:
    """The configs that won the nearest recorded searches. They were timed but not certified, so
    their distance is larger than that of a row's config."""
    winners = [(request.distance(one), one) for one in (ranking.winners if ranking else ())]
    found: list[Start] = []
    for far, winner in sorted(winners, key=lambda entry: entry[0]):
        config = request.config(winner.config)
        if config is not None and config[0].admits:
            found.append(Start(far + FIRST, *config, winner))
            if len(found) == MOST_STARTS:
                break
    return found


def _unproven(request: _Request, known: Iterable[tuple[float, Row]]) -> list[Start]:
    """The configs that a search would try first. The distance of one that no row holds is that of
    its variant's nearest row, plus a penalty."""
    nearest: dict[str, float] = {}
    for far, row in known:
        nearest.setdefault(row.config.partition("(")[0], far)
    starts: list[Start] = []
    unproven = UNPROVEN
    for rules in request.families.values():
        if rules.family.is_safe:
            continue
        near = nearest.get(rules.family.name)
        if near is None:
            near, unproven = unproven, unproven + NEXT_UNPROVEN
        starts += [Start(near + FIRST, rules, values, None) for values in rules.family.first]
    return starts


def _instances(
    rows: Iterable[tuple[_Rank, RowChoice]], starts: Iterable[Start]
) -> list[tuple[_Rank, RowChoice]]:
    """Adapt configs to the call.

    Args:
        rows: The rows that serve unchanged; their configs are not adapted.
        starts: The configs to adapt.
    """
    instances: dict[str, tuple[_Rank, RowChoice]] = {}
    as_they_are = {choice.config for _, choice in rows}
    least = min((far for (_, is_bad, far), _ in rows if not is_bad), default=inf)
    offered: set[str] = set()  # variants with a legal config
    for start in sorted(starts, key=lambda start: start.far):
        family = start.rules.family
        # A config farther than the best one serves only if that fails: one per variant is enough.
        changes = MOST_CHANGES if start.far < least or family.name not in offered else 0
        found = start.rules.adapted(start.values, changes)
        if found is None or found.instance.config in as_they_are:
            continue
        offered.add(family.name)
        cost = start.far + STEP * found.steps
        if found.suits and not family.is_safe:
            least = min(least, cost)
        rank = (family.is_safe, not found.suits, cost)
        config = found.instance.config
        # Several starts may lead to the same config; the nearest start counts.
        if config not in instances or rank < instances[config][0]:
            choice = RowChoice("family", None, instance=found.instance)
            instances[config] = rank, (
                choice._replace(winner=start.begun) if isinstance(start.begun, Winner)
                else choice._replace(row=start.begun))
    return list(instances.values())


def _features(request: _Request, choice: RowChoice) -> dict[str, float]:
    """The numbers by which a choice is ranked; empty if its config does not belong to a family."""
    if choice.instance is not None:
        family, values = choice.instance
        rules = request.families[family.name]
    elif (found := request.config(choice.config)) is not None:
        rules, values = found
    else:
        return {}
    names = (dim.name for dim in request.signature.dims)
    fields = (field.name for field in request.signature.choices)
    return features_of(
        rules.family, values, rules.call_of(values),
        dict(zip(names, request.dims, strict=True)),
        dict(zip(fields, request.dtypes, strict=True)))


def explanation(
    signature: PassSignature, table: Table, choice: RowChoice,
    dims: Mapping[str, int], dtypes: tuple[str, ...], where: str,
) -> Explanation:
    """Describe the chosen row and the evidence for it.

    Args:
        signature: The signature of the pass.
        table: The table from which the row was chosen.
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
