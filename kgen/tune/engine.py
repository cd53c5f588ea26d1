"""A tune: every pass in turn, every problem of a pass in turn, on one worker."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

from kgen.build.render import check_template
from kgen.errors import KgenError, TuneError
from kgen.model.config import Config
from kgen.search.feasible import Feasible, enumerate_feasible
from kgen.trial import HostRunner, Session, WorkerPool
from kgen.tune.announcement import Announcement
from kgen.tune.builds_ahead import BuildsAhead, builds_at_once
from kgen.tune.confirmation import Confirmations
from kgen.tune.events import (
    PassDone,
    ProblemConfirmed,
    SafeCertified,
    StageStarted,
    TuneEvent,
)
from kgen.tune.joint import Joint, open_joint
from kgen.tune.problem import ProblemTask, tune_problem
from kgen.tune.recorded_winners import EarlierRecords
from kgen.tune.request import TuneRequest
from kgen.tune.results import PassResult, ProblemResult
from kgen.tune.safe import SafeCertificates
from kgen.tune.search_loop import BUILD_AHEAD, OVERTIME_S
from kgen.tune.search_state import SearchState
from kgen.tune.session import open_session, worker_pool
from kgen.tune.warm_start import WarmStart, warm_start

# The least time of a search, as a part of an equal share of the tune's time. Finals of earlier
# problems count, too, and may have taken all of it; then a search would end with its first configs.
LEAST_SHARE = 0.25


def tune(request: TuneRequest) -> Generator[TuneEvent, None, None]:
    """Tune the passes of an operator for several problems on one GPU.

    Every trial is in the journal before its event is yielded; the same request resumes. A confirmed
    problem is yielded at once, so the events of a failed tune contain the problems before the
    failure.

    Yields:
        The events of `kgen.tune.events`; `PassDone` is the last one of a pass. A caller that stops
        reading early must `close` the generator, which ends the worker.
    Raises:
        TuneError: If a problem ends with no verified config, or the safe variant is wrong.
        WorkerError: If the device cannot be used.
        EmptySpaceError, TemplateError, StorageError: As named.
    """
    forget_study_without_journal(request)
    with open_joint(request, is_tuner=True) as joint, Announcement(joint, request):
        for pass_name in request.passes:
            yield from _tune_pass(request, pass_name, joint)


def forget_study_without_journal(request: TuneRequest) -> None:
    """Remove the study's file if there is no journal beside it.

    The study is a view of the journal. Without the journal it would list configs without records.
    """
    if not request.journal.exists():
        request.study.unlink(missing_ok=True)


def _tune_pass(request: TuneRequest, pass_name: str, joint: Joint | None) -> Iterator[TuneEvent]:
    started = time.monotonic()
    spaces = checked_spaces(request, pass_name)
    with (
        open_session(request, pass_name) as (session, host_runner),
        worker_pool(request, session) as pool,
        BuildsAhead(session, builds_at_once()) as builds_ahead,
    ):
        yield from _PassTune(
            request, spaces, session, host_runner, pool, builds_ahead, started, joint
        ).run()


def checked_spaces(request: TuneRequest, pass_name: str) -> list[Feasible]:
    """The feasible configs of each problem.

    All are enumerated before any trial, so that the user learns of an empty space at once.
    """
    entry = request.entry
    variants = entry.space.of_pass(pass_name)
    for variant in variants:
        check_template(entry.templates / variant.template, variant, entry.operator.signature)
    pass_ = entry.operator.signature.pass_named(pass_name)
    problems = request.problems[pass_name]
    return [enumerate_feasible(variants, pass_, p, request.gpu) for p in problems]


class _PassTune:
    """The tune of one pass: its tools and its state."""

    def __init__(
        self,
        request: TuneRequest,
        spaces: Sequence[Feasible],
        session: Session,
        host_runner: HostRunner,
        pool: WorkerPool,
        builds_ahead: BuildsAhead,
        started: float,
        joint: Joint | None = None,
    ) -> None:
        self._joint = joint
        self._request, self._spaces, self._started = request, spaces, started
        self._session, self._host_runner, self._pool = session, host_runner, pool
        self._builds_ahead = builds_ahead
        self._problems = request.problems[session.pass_name]
        self._earlier = EarlierRecords.read(
            session.pass_name,
            request.journal.parent,
            # On the CPU the winners of GPUs say little.
            [] if request.gpu.is_host else [path.parent for path in request.certificates],
        )
        self._searched_s = 0.0
        self._overtime_s = OVERTIME_S  # the remaining overtime
        self._results: list[ProblemResult] = []
        self._build_ahead(0)
        self._copy_gbps = session.probe()
        if joint is not None:
            joint.share_journal(session, request)
        self._safe: SafeCertificates | None = None
        self._safe_told = 0  # number of safe kernels in the last event
        self._confirmations = Confirmations(session, host_runner, self._confirmed_event)

    def run(self) -> Iterator[TuneEvent]:
        """Tune all problems, and wait until they are confirmed."""
        try:
            for place in range(len(self._spaces)):
                yield from self._tune_next(place)
        except KgenError as problem:
            if self._safe is not None:  # confirm the problems before the failed one
                if isinstance(problem, TuneError):  # after other errors the device may be gone
                    yield from self._certify_rest(self._safe)
                yield from self._wait_for_all(self._safe)
            raise
        assert self._safe is not None  # a request has at least one problem
        yield from self._certify_rest(self._safe)
        yield from self._wait_for_all(self._safe)
        confirmed = yield from self._confirmations.finish(self._finals_again)
        self._safe.raise_failures()
        yield PassDone(self._result(confirmed, self._safe))

    def _tune_next(self, place: int) -> Iterator[TuneEvent]:
        """Tune a problem and start its winner's host run; after the first, certify the safe
        variant for the tuned dtypes.

        Time that earlier problems did not use is shared among the remaining ones.
        """
        result = yield from self._tune_problem(place, share=len(self._spaces) - place)
        self._results.append(result)
        self._confirmations.add(result)
        if self._safe is None:
            yield StageStarted("safe")
            safe = SafeCertificates(
                self._session, self._host_runner, self._pool, self._problems
            )
            yield from safe.certify_tuned()
            self._safe = safe
            if place + 1 < len(self._spaces):  # a search needs the device's memory
                self._pool.dismiss()
        if self._request.gpu.is_host:  # on the host, host runs would disturb the next timings
            yield StageStarted("host runs")
            yield from self._confirmations.advance(wait=True)

    def _certify_rest(self, safe: SafeCertificates) -> Iterator[TuneEvent]:
        """Certify the safe variant for the other dtypes."""
        yield StageStarted("safe")
        with closing(safe.certify_rest()) as events:
            for event in events:
                yield event
                yield from self._advance()
        self._pool.dismiss()

    def _advance(self) -> Iterator[TuneEvent]:
        """Process the host runs of winners and of safe kernels that have ended."""
        if self._safe is not None:
            self._safe.advance()
        yield from self._confirmations.advance()
        confirmed = self._confirmations.confirmed
        if self._safe is None or not confirmed or not self._safe.is_ready:
            return
        if self._safe.whole > self._safe_told:
            self._safe_told = self._safe.whole
            yield SafeCertified(self._result(confirmed, self._safe))

    def _finals_again(self, refused: ProblemResult) -> Generator[TuneEvent, None, ProblemResult]:
        """Tune a problem again without its finalists, which were all refused."""
        place = self._problems.index(refused.problem)
        result = yield from self._tune_problem(place, share=1, again=True)
        yield StageStarted("host runs")
        return result

    def _tune_problem(
        self, place: int, share: int, again: bool = False
    ) -> Generator[TuneEvent, None, ProblemResult]:
        """Tune a problem with its share of the remaining time."""
        started = time.monotonic()
        deadline = None
        if self._request.pass_time_s is not None:  # counts searches and finals only
            left_s = (self._request.pass_time_s - self._searched_s) / share
            least_s = LEAST_SHARE * self._request.pass_time_s / len(self._spaces)
            deadline = started + max(left_s, least_s)

        def before_finals(state: SearchState) -> None:
            leaders = state.ranking()[:1]
            if not self._request.gpu.is_host:  # on the host it would disturb the finals' timings
                for leader in leaders:
                    self._confirmations.start_early(self._problems[place], leader)
            if not again:
                self._build_ahead(place + 1, [record.config for record in leaders])

        task = ProblemTask(
            self._problems[place],
            self._spaces[place],
            self._first_trials(place),
            deadline,
            retry=self._request.retry and not again,  # the first search has already retried them
            joint=self._joint,
            overtime_s=self._overtime_s,
        )
        result = yield from tune_problem(
            self._session,
            self._request,
            task,
            self._builds_ahead,
            self._copy_gbps,
            self._advance,
            before_finals,
        )
        self._searched_s += time.monotonic() - started
        if deadline is not None:
            late_s = started + result.search_s - deadline
            self._overtime_s = max(0.0, self._overtime_s - max(0.0, late_s))
        return result

    def _first_trials(self, place: int, likely: Sequence[Config] = ()) -> WarmStart:
        """The warm start of a problem: the config that the library runs now, winners of this tune's
        earlier problems, then winners of earlier tunes, also of those of the committed library.
        """
        pass_name, problem = self._session.pass_name, str(self._problems[place])
        served = self._request.served.get((pass_name, problem))
        winners = [result.winner.config for result in reversed(self._results[:place])]
        return warm_start(
            self._request.entry.space.of_pass(pass_name),
            set(self._spaces[place].configs),
            [*([] if served is None else [served]), *likely, *winners],
            self._earlier.winners(problem),
        )

    def _build_ahead(self, place: int, likely: Sequence[Config] = ()) -> None:
        """Build a problem's warm-start configs while the device does something else.

        Args:
            place: Index of the problem; nothing happens beyond the last.
            likely: Configs that may win the problem before it.
        """
        # On the host the compiler would disturb the timings of finals and of the bandwidth probe.
        if place < len(self._spaces) and not self._request.gpu.is_host:
            first = self._first_trials(place, likely).configs
            self._builds_ahead.start(
                self._problems[place], first[: min(self._request.trials, BUILD_AHEAD)]
            )

    def _wait_for_all(self, safe: SafeCertificates) -> Iterator[TuneEvent]:
        """Wait for all running host runs."""
        if self._joint is None:  # otherwise other processes of the tune may be timing kernels
            self._host_runner.widen()
        yield StageStarted("host runs")
        yield from self._advance()
        while running := [*self._confirmations.host_runs, *safe.host_runs]:
            concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            yield from self._advance()

    def _confirmed_event(self, confirmed: tuple[ProblemResult, ...]) -> ProblemConfirmed | None:
        """The event of another confirmed problem; None until the safe variant is certified for
        the tuned dtypes.
        """
        if self._safe is None or not self._safe.is_ready:
            return None
        self._safe_told = self._safe.whole
        return ProblemConfirmed(self._result(confirmed, self._safe))

    def _result(self, results: tuple[ProblemResult, ...], safe: SafeCertificates) -> PassResult:
        return PassResult(
            self._request,
            self._session.pass_name,
            dict(self._session.environment),
            self._copy_gbps,
            results,
            safe.results(),
            tuple(one.dtypes for one in safe.missing()),
            self._session.worker.restarts,
            time.monotonic() - self._started,
        )

