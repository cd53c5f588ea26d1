"""Try given configs on many problems with one worker: the measurements of `kgen learn`.

The trials run in the search loop: they are built ahead, verified, timed and recorded in the
journal. Trials with a record are not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kgen.model.artifact import BuildFailure
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Record
from kgen.search.feasible import Feasible, enumerate_feasible
from kgen.trial import HostRunner, HostRunResult, Session, certify, record_host_runs
from kgen.tune.builds_ahead import BuildsAhead, builds_at_once
from kgen.tune.finals import finalist
from kgen.tune.request import TuneRequest
from kgen.tune.results import Finalist
from kgen.tune.search_loop import ProblemSearch
from kgen.tune.search_state import SearchState
from kgen.tune.session import open_session
from kgen.tune.warm_start import WarmStart, warm_start
from kgen.worker import Candidate, Finals


@dataclass(frozen=True)
class AwaitingHostRun:
    """A certified config whose host run has not ended."""

    problem: Problem
    finalist: Finalist
    host_run: Future[HostRunResult]


@contextmanager
def open_sweep(request: TuneRequest, pass_name: str) -> Iterator[Sweep]:
    """Open the worker of a sweep; it ends with the block.

    Args:
        request: As for a tune; its problems are ignored.
        pass_name: `forward` or `backward`.
    Raises:
        WorkerError: If the device cannot be used.
    """
    with (
        open_session(request, pass_name) as (session, host_runner),
        BuildsAhead(session, builds_at_once()) as builds_ahead,
    ):
        copy_gbps = session.probe()
        yield Sweep(request, session, host_runner, builds_ahead, copy_gbps)


class Sweep:
    """The tools of a sweep.

    Attributes:
        session: The session of the trials.
        copy_gbps: Measured copy bandwidth of the device.
    """

    def __init__(
        self,
        request: TuneRequest,
        session: Session,
        host_runner: HostRunner,
        builds_ahead: BuildsAhead,
        copy_gbps: float,
    ) -> None:
        self.session, self.copy_gbps = session, copy_gbps
        self._request, self._host_runner = request, host_runner
        self._builds_ahead = builds_ahead

    def prepare(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Start the builds of a later `try_all` in the background."""
        if not self.session.gpu.is_host:  # on the host the compiler would disturb the timings
            for config in configs:
                self.session.build(self.session.render(config, problem))

    def try_all(self, problem: Problem, configs: Sequence[Config]) -> SearchState:
        """Verify and time configs on a problem.

        Args:
            problem: The problem.
            configs: Feasible configs; at least one.
        """
        return self._search(
            problem, Feasible(tuple(configs), len(configs), ()), WarmStart(tuple(configs)),
            len(configs), None, every_time=True,
        )

    def search(self, problem: Problem, likely: Sequence[Config], deadline: float) -> SearchState:
        """Search a problem as a tune does, with the request's number of trials.

        Args:
            problem: The problem.
            likely: The configs to try first.
            deadline: When to end if there is a result, as of `time.monotonic`.
        Raises:
            EmptySpaceError: If no config is feasible.
        """
        entry, session = self._request.entry, self.session
        variants = entry.space.of_pass(session.pass_name)
        pass_ = entry.operator.signature.pass_named(session.pass_name)
        feasible = enumerate_feasible(variants, pass_, problem, session.gpu)
        first = warm_start(variants, set(feasible.configs), likely)
        return self._search(problem, feasible, first, self._request.trials, deadline)

    def compare(self, problem: Problem, configs: Sequence[Config]) -> tuple[float, ...]:
        """Time verified configs against each other, interleaved; medians in microseconds."""
        candidates = tuple(self._candidate(config, problem) for config in configs)
        finals = Finals(self.session.pass_name, problem, candidates, peers=())
        return tuple(t.median_us for t in self.session.worker.finals(finals).timings)

    def certify(self, problem: Problem, trial: Record) -> AwaitingHostRun | None:
        """Certify a verified trial with all inputs, as a tune certifies its winners.

        Starts the host run in the background. Returns None if the device run refused the config.
        """
        certificate = certify(self.session, problem, trial)
        if certificate is None or not certificate.is_verified:
            return None
        assert trial.timing is not None
        certified = finalist(self.session, problem, certificate, trial.timing)
        host_run = self._host_runner.start(
            certified.rendered,
            certified.variant,
            certified.config,
            self.session.pass_name,
            problem,
            certified.record.evidence,
        )
        return AwaitingHostRun(problem, certified, host_run)

    def confirm(self, waiting: AwaitingHostRun) -> Finalist:
        """Wait for the host run; the finalist's record is `wrong` if the run found a fault."""
        certified, host_run = waiting.finalist, waiting.host_run.result()
        if host_run.kept:
            return certified
        record = record_host_runs(
            self.session,
            waiting.problem,
            certified.rendered,
            certified.artifact,
            certified.record,
            host_run,
        )
        return replace(certified, record=record)

    def _search(
        self,
        problem: Problem,
        feasible: Feasible,
        first: WarmStart,
        trials: int,
        deadline: float | None,
        every_time: bool = False,
    ) -> SearchState:
        search = ProblemSearch(
            self.session,
            self._request,
            problem,
            feasible,
            first,
            self._builds_ahead,
            trials=trials,
            deadline=deadline,
            retry=self._request.retry,
            every_time=every_time,
        )
        for _ in search.run():
            pass
        return search.state

    def _candidate(self, config: Config, problem: Problem) -> Candidate:
        built = self.session.build(self.session.render(config, problem)).result()
        assert not isinstance(built, BuildFailure)  # it was verified
        return self.session.candidate(config, built)
