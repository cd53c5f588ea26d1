"""The learning of one group's rule: candidates, times, tree, and the rows that the rule needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from kgen.catalogue import Entry
from kgen.emit import TUNED, RowState
from kgen.learn.fit import Fitted, Sample, fit_tree
from kgen.learn.grid import Group, features, training_problems
from kgen.learn.report import RuleReport, TrainingProblem
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.model.rule_tree import LearntRule, leaf_of, leaves, tree_lines, with_names
from kgen.runtime.distance import distance
from kgen.runtime.rules import are_near
from kgen.search.declared import as_declared
from kgen.search.feasible import is_feasible
from kgen.trial import Session
from kgen.tune import Sweep

MOST_CONFIGS = 16  # per problem
FEW = 4  # number of feasible candidates with which a problem needs no search of its own
LIKELY = 8  # candidates in the warm start of a search
FOUND = 2  # configs of a search that become candidates
# Share by which a config without a row must be better to justify another kernel in the library.
NEW_ROW_COST = 0.02


@dataclass
class GroupWork:
    """The state of a group's learning.

    Attributes:
        group: The group.
        session: The session of the trials.
        configs: The candidates.
        records: Digest of a config -> the record of its row that the library has or will get.
        kept: Digests of configs whose rows the library already has.
        tuned: Problems with a tuned row -> the row's config.
        learnt: Likewise for rows from learning.
        taken: Problems with a row, which no new row may replace.
        problems: Training problems, the anchors first.
        tried: Measured training problems -> verified records by digest.
    """

    group: Group
    session: Session
    configs: tuple[Config, ...]
    records: dict[str, str]
    kept: frozenset[str]
    tuned: dict[Problem, Config]
    taken: frozenset[Problem]
    problems: tuple[Problem, ...]
    learnt: dict[Problem, Config] = field(default_factory=dict)
    tried: dict[Problem, dict[str, Record]] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)
    _fitted: Fitted | None = None

    def explore(self, sweep: Sweep, problem: Problem, deadline: float) -> None:
        """Search a training problem, and add the best configs to the candidates.

        Args:
            sweep: The sweep of the trials.
            problem: The problem.
            deadline: When to end if there is a result, as of `time.monotonic`.
        """
        ranking = sweep.search(problem, self.likely(problem), deadline).ranking()
        found = [record.config for record in ranking[:FOUND]]
        # Before the candidates of other groups, after those of existing rows.
        own = [config for config in self.configs if config.digest in self.kept]
        self.configs = tuple(dict.fromkeys([*own, *found, *self.configs]))

    def outlying(self, explored: Sequence[Problem]) -> Problem | None:
        """The training problem to search next, or None.

        It is the one with the fewest feasible candidates; among several, the one farthest from
        tuned and explored problems.
        """
        known = [*self.tuned, *explored]
        left = [problem for problem in self.problems if problem not in known]

        def order(problem: Problem) -> tuple[int, float]:
            feasible = sum(self.is_feasible(config, problem) for config in self.configs)
            return min(feasible, FEW), -_least_distance(problem, known)

        return min(left, key=order, default=None)

    def measure(self, sweep: Sweep, problem: Problem) -> None:
        """Try all candidates that are feasible on a training problem."""
        feasible = self.feasible(problem)
        if not feasible:
            return
        found = {
            config.digest: record
            for config, record in sweep.try_all(problem, feasible).records.items()
            if record.fate is Fate.VERIFIED and record.timing is not None
        }
        if found:
            self.tried[problem] = found

    def feasible(self, problem: Problem) -> list[Config]:
        """The candidates to try on a problem, at most a fixed number."""
        found = [config for config in self.configs if self.is_feasible(config, problem)]
        return found[:MOST_CONFIGS]

    def likely(self, problem: Problem) -> list[Config]:
        """The configs in the warm start of a problem's search."""
        return self.feasible(problem)[:LIKELY]

    def is_feasible(self, config: Config, problem: Problem) -> bool:
        """Whether a config may serve a contiguous, aligned call of a problem.

        Like the rows of the library, this checks legality rules only.
        """
        session = self.session
        pass_ = session.entry.operator.signature.pass_named(session.pass_name)
        return is_feasible(
            session.variant_of(config), config, pass_, problem, session.gpu, legality_only=True
        )

    def fitted(self) -> Fitted:
        """The tree over digests of configs."""
        if self._fitted is None:
            samples = [self._sample(problem) for problem in self._samples]
            new = {c.digest: NEW_ROW_COST for c in self.configs if c.digest not in self.kept}
            compared = features(self.group, self.session.entry.operator)
            self._fitted = fit_tree(samples, compared, new)
        return self._fitted

    def wanted(self) -> list[tuple[Problem, Record]]:
        """Verified trials that must become rows because the tree prefers their configs."""
        while True:
            fitted = self.fitted()
            first = dict.fromkeys(leaf.rows[0] for leaf in leaves(fitted.tree))
            found: list[tuple[Problem, Record]] = []
            for digest in first:
                if digest in self.records:
                    continue
                place = self._best_place(digest, fitted, {problem for problem, _ in found})
                if place is None:
                    self._refuse(digest)
                    break
                found.append(place)
            else:
                return found

    def decide(self, problem: Problem, record: Record, row: str | None) -> None:
        """Set the result of a wanted trial: the record of its row, or None."""
        if row is None:
            self._refuse(record.config.digest)
        else:
            self.records[record.config.digest] = row
            self.taken |= {problem}
            self.learnt[problem] = record.config

    def rule(self) -> LearntRule:
        """The rule; call it only when `wanted` is empty."""
        fitted = self.fitted()
        return LearntRule(
            self.session.pass_name,
            self.group.dtypes,
            self.group.constants,
            with_names(fitted.tree, self.records),
            len(fitted.losses),
            round(fitted.mean_loss, 4),
            round(fitted.worst_loss, 4),
            self._extents(),
        )

    def _extents(self) -> tuple[tuple[str, int, int], ...]:
        """(dim, smallest, largest extent) of the training problems, without compiled-in dims."""
        fixed = {name for name, _ in self.group.constants}
        seen = {name: [dict(problem.dims)[name] for problem in self._samples]
                for name, _ in next(iter(self._samples)).dims if name not in fixed}
        return tuple((name, min(found), max(found)) for name, found in seen.items())

    def report(self, new: Iterable[str]) -> RuleReport:
        """The report of the rule; `new` are the records of rows added with all rules."""
        fitted, rule = self.fitted(), self.rule()
        labels = {config.digest: config.label for config in self.configs}
        training = []
        for problem, loss in zip(self._samples, fitted.losses, strict=True):
            times = self._sample(problem).times_us
            best = min(times, key=times.__getitem__)
            training.append(TrainingProblem(str(problem), times[best], labels[best], loss))
        return RuleReport(
            rule.pass_name,
            self.group.label,
            tuple(tree_lines(rule.tree)),
            tuple(sorted(rule.records & set(new))),
            fitted.mean_loss,
            fitted.worst_loss,
            tuple(training),
        )

    def choice(self, problem: Problem) -> Config | None:
        """The row that the library will choose for a problem without a row of its own.

        It is the rule's choice if it covers the problem, else the nearest row; None if no row fits.
        All wanted rows must exist.
        """
        known = {config.digest: config for config in self.configs}
        dims = dict(problem.dims)
        covered = are_near(dims, self._extents())
        rows = [known[digest] for digest in leaf_of(self.fitted().tree, dims).rows if covered]
        fitting = (config for config in rows if self.is_feasible(config, problem))
        wanted = {at: record.config for at, record in self.wanted()}
        return next(fitting, None) or self._nearest(
            problem, {**self.learnt, **wanted, **self.tuned}
        )

    def nearest(self, problem: Problem) -> Config | None:
        """The row that the library would choose without rules: the nearest tuned row that fits."""
        return self._nearest(problem, self.tuned)

    def _nearest(self, problem: Problem, rows: Mapping[Problem, Config]) -> Config | None:
        fitting = [other for other, config in rows.items() if self.is_feasible(config, problem)]
        if not fitting:
            return None
        return rows[min(fitting, key=lambda other: _least_distance(problem, [other]))]

    def _refuse(self, digest: str) -> None:
        self._refused.add(digest)
        self._fitted = None

    @property
    def _samples(self) -> list[Problem]:
        return [problem for problem in self.tried if self._sample(problem).times_us]

    def _sample(self, problem: Problem) -> Sample:
        times = {
            digest: record.timing.median_us
            for digest, record in self.tried[problem].items()
            if record.timing is not None and digest not in self._refused
        }
        return Sample(dict(problem.dims), times)

    def _best_place(
        self, digest: str, fitted: Fitted, promised: set[Problem]
    ) -> tuple[Problem, Record] | None:
        """The problem where a config is closest to the best, with its trial.

        Only problems without a row that the tree assigns to the config are considered.
        """
        places = [
            problem
            for problem in self._samples
            if problem not in self.taken | promised
            and digest in self.tried[problem]
            and leaf_of(fitted.tree, dict(problem.dims)).rows[0] == digest
        ]
        if not places:
            return None
        best = min(places, key=lambda problem: self._sample(problem).losses[digest])
        return best, self.tried[best][digest]


def _least_distance(problem: Problem, others: Sequence[Problem]) -> float:
    """The distance to the nearest other problem, as dispatch measures it; inf if there are none."""
    extents = [extent for _, extent in problem.dims]
    return min((distance(extents, [e for _, e in other.dims]) for other in others), default=inf)


def open_group(
    session: Session, entry: Entry, group: Group, rows: Sequence[RowState], points: int
) -> GroupWork:
    """Choose a group's candidates and training problems.

    Candidates are the configs of the group's rows, then of rows of the same dtypes, then of the
    pass's other rows, then the `first` configs of the search space.

    Args:
        session: The session of the trials, of the pass.
        entry: The operator.
        group: The group.
        rows: The library's rows of the pass.
        points: Largest number of training problems; all anchors are included.
    """
    same_dtypes = [row for row in rows if row.dtypes == group.dtypes]
    own = [row for row in same_dtypes if set(group.constants) <= set(row.dims)]
    configs: dict[Config, None] = {}
    records: dict[str, str] = {}
    tuned: dict[Problem, Config] = {}
    learnt: dict[Problem, Config] = {}
    for row in [*own, *same_dtypes, *rows]:
        config = as_declared(entry, session.pass_name, Config(row.variant, row.config))
        if config is None:
            continue
        configs[config] = None
        problem = Problem(row.dims, row.dtypes)
        # If the template has changed, the row's kernel differs from the one measured now.
        if row in own and row.is_measured and session.render(config, problem).digest == row.kernel:
            records.setdefault(config.digest, row.record)
            (tuned if row.origin == TUNED else learnt)[problem] = config
    for variant in entry.space.of_pass(session.pass_name):
        if variant.safe is None:  # the safe variant is not meant to be fast
            configs |= dict.fromkeys(variant.first)
    return GroupWork(
        group=group,
        session=session,
        configs=tuple(configs),
        records=records,
        kept=frozenset(records),
        tuned=tuned,
        taken=frozenset(Problem(row.dims, row.dtypes) for row in own if row.is_measured),
        problems=training_problems(group, entry.operator, session.pass_name, points),
        learnt=learnt,
    )
