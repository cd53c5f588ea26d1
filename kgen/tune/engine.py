"""The whole tune of one pass: every problem in turn, on one worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from kgen.errors import KgenError
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.render import check_template
from kgen.search.feasible import Feasible, enumerate_feasible
from kgen.tune.ahead import Ahead, builds_at_once
from kgen.tune.display import say_stage
from kgen.tune.first import FirstTrials, first_trials
from kgen.tune.opened import opened_session
from kgen.tune.problem import tune_problem
from kgen.tune.request import ProblemResult, TuneRequest, TuneResult
from kgen.tune.safe import SafeCertificates
from kgen.tune.search_loop import BUILD_AHEAD, Books
from kgen.tune.settle import Settlements
from kgen.worker import HostProver, Session


def tune(request: TuneRequest) -> TuneResult:
    """Tune one pass of one operator for several problems on one GPU.

    Every trial is in the journal when this returns or raises; the same request resumes. What is
    settled goes to `request.on_settled` at once, so a tune that dies leaves the problems before.

    Raises:
        TuneError: If a problem ends with no verified config, or the safe variant is not right.
        WorkerError: If the device cannot be used.
        EmptySpaceError, TemplateError, StorageError: As named.
    """
    started = time.monotonic()
    spaces = _checked_spaces(request)
    if not request.journal.exists():
        # The study is a view of the journal; alone it would name configs done that nobody knows.
        request.study.unlink(missing_ok=True)
    with opened_session(request) as (session, prover), Ahead(session, builds_at_once()) as ahead:
        return _Tune(request, spaces, session, prover, ahead, started).run()


def _checked_spaces(request: TuneRequest) -> list[Feasible]:
    """The feasible configs of each problem. All are enumerated before any work: a broken template
    or an empty space is the user's to mend.
    """
    entry = request.entry
    variants = entry.space.of_pass(request.pass_name)
    for variant in variants:
        check_template(entry.templates / variant.template, variant, entry.operator.signature)
    pass_ = entry.operator.signature.pass_named(request.pass_name)
    return [enumerate_feasible(variants, pass_, p, request.gpu) for p in request.problems]


class _Tune:
    """A tune under way: its tools, and how far it is."""

    def __init__(
        self,
        request: TuneRequest,
        spaces: Sequence[Feasible],
        session: Session,
        prover: HostProver,
        ahead: Ahead,
        started: float,
    ) -> None:
        self._request, self._spaces, self._started = request, spaces, started
        self._session, self._prover, self._ahead = session, prover, ahead
        self._searched_s = 0.0
        self._results: list[ProblemResult] = []
        self._build_ahead(0)
        self._copy_gbps = session.probe()
        self._safe: SafeCertificates | None = None
        self._settlements = Settlements(session, prover, self._publish)

    def run(self) -> TuneResult:
        """Tune all problems, and wait until they are settled."""
        try:
            for place in range(len(self._spaces)):
                self._tune_next(place)
        except KgenError:
            if self._safe is not None:  # the problems before the one that failed are not lost
                self._collect_all(self._safe)
            raise
        assert self._safe is not None  # there is a problem at least
        self._collect_all(self._safe)
        settled = self._settlements.finish(self._play_again)
        self._say("done")
        return self._result(settled, self._safe)

    def _tune_next(self, place: int) -> None:
        """Tune one problem, start its winner's host run and, after the first, the safe variant's.

        What earlier problems left over of the time limit goes to those that are left.
        """
        problem = self._request.problems[place]
        result = self._tune_problem(problem, place, share=len(self._spaces) - place)
        self._results.append(result)
        self._settlements.add(result)
        if self._safe is None:
            self._say("safe")
            self._safe = SafeCertificates(self._session, self._prover)
        if self._request.gpu.is_host:  # beside the next search it would disturb what is timed
            self._say("host runs")
            self._settlements.collect(wait=True)

    def _play_again(self, refused: ProblemResult) -> ProblemResult:
        """Tune a problem whose finalists were all refused, without them."""
        place = self._request.problems.index(refused.problem)
        result = self._tune_problem(refused.problem, place, share=1, again=True)
        self._say("host runs")
        return result

    def _tune_problem(
        self, problem: Problem, place: int, share: int, again: bool = False
    ) -> ProblemResult:
        """Tune a problem with its share of the time that is left."""
        request = self._request
        started = time.monotonic()
        deadline = None
        if request.time_s is not None:  # of the searches and finals alone
            deadline = started + max(0.0, request.time_s - self._searched_s) / share

        def before_finals(books: Books) -> None:
            if not again:
                self._build_ahead(place + 1, [record.config for record in books.ranking()[:1]])

        result = tune_problem(
            self._session,
            # What crashed was tried again already.
            replace(request, retry=False) if again else request,
            problem,
            self._spaces[place],
            self._first_trials(place),
            self._ahead,
            self._copy_gbps,
            deadline,
            self._settlements.collect,
            before_finals,
        )
        self._searched_s += time.monotonic() - started
        return result

    def _first_trials(self, place: int, likely: Sequence[Config] = ()) -> FirstTrials:
        """What the search of a problem begins with: winners of those before, the nearest first."""
        winners = [result.winner.config for result in reversed(self._results[:place])]
        return first_trials(
            self._request.entry.space.of_pass(self._request.pass_name),
            set(self._spaces[place].configs),
            [*likely, *winners],
        )

    def _build_ahead(self, place: int, likely: Sequence[Config] = ()) -> None:
        """Have a problem's first trials built while the device is at something else.

        Args:
            place: The problem's; beyond the last there is nothing to do.
            likely: Configs that may win the problem before.
        """
        # On the host the compiler would disturb what finals and the probe time.
        if place < len(self._spaces) and not self._request.gpu.is_host:
            first = self._first_trials(place, likely).configs
            self._ahead.start(
                self._request.problems[place], first[: min(self._request.trials, BUILD_AHEAD)]
            )

    def _collect_all(self, safe: SafeCertificates) -> None:
        """Wait for all host runs that are under way."""
        self._say("host runs")
        safe.results()
        self._settlements.collect(wait=True)

    def _publish(self, settled: tuple[ProblemResult, ...]) -> bool:
        """Hand over what is settled; whether that was possible."""
        if self._safe is None or not self._safe.done:  # rows need something to fall back on
            return False
        if len(settled) < len(self._spaces):  # all of them are what `run` returns
            self._request.on_settled(self._result(settled, self._safe))
        return True

    def _result(
        self, results: tuple[ProblemResult, ...], safe: SafeCertificates
    ) -> TuneResult:
        return TuneResult(
            self._request,
            dict(self._session.environment),
            self._copy_gbps,
            results,
            safe.results(),
            self._session.worker.restarts,
            time.monotonic() - self._started,
        )

    def _say(self, stage: str) -> None:
        say_stage(self._request, len(self._results), stage)
