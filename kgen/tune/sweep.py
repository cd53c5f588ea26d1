"""Trials of given configs on many problems, on one worker: what rules of dispatch are learnt from.

The trials are those of a search, by the same loop: built ahead, verified, timed, written down in
the journal, and not repeated.
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
from kgen.tune.ahead import Ahead, builds_at_once
from kgen.tune.finals import certify, finalist
from kgen.tune.first import FirstTrials, first_trials
from kgen.tune.opened import opened_session
from kgen.tune.request import Finalist, TuneRequest
from kgen.tune.search_loop import Books, search_problem
from kgen.tune.settle import with_host_run
from kgen.worker import Candidate, Finals, HostProver, Proof, Session


@dataclass(frozen=True)
class Entered:
    """A config with its certificate, whose host run is under way."""

    problem: Problem
    finalist: Finalist
    proof: Future[Proof]


@contextmanager
def opened_sweep(request: TuneRequest) -> Iterator[Sweep]:
    """Open the worker of a sweep; it ends with the block.

    Args:
        request: As of a tune; its problems do not count.
    Raises:
        WorkerError: If the device cannot be used.
    """
    with opened_session(request) as (session, prover), Ahead(session, builds_at_once()) as ahead:
        copy_gbps = session.probe()
        yield Sweep(request, session, prover, ahead, copy_gbps)


class Sweep:
    """The tools of a sweep.

    Attributes:
        session: Of the trials.
        copy_gbps: Measured copy bandwidth of the device.
    """

    def __init__(
        self,
        request: TuneRequest,
        session: Session,
        prover: HostProver,
        ahead: Ahead,
        copy_gbps: float,
    ) -> None:
        self.session, self.copy_gbps = session, copy_gbps
        self._request, self._prover, self._ahead = request, prover, ahead

    def prepare(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Start builds that `try_all` will want; they go on in the background."""
        if not self.session.gpu.is_host:  # there the compiler would disturb what is timed
            for config in configs:
                self.session.build(self.session.render(config, problem))

    def try_all(self, problem: Problem, configs: Sequence[Config]) -> Books:
        """Verify and time configs on a problem.

        Args:
            problem: The problem.
            configs: Feasible ones; at least one.
        """
        return self._search(
            problem, Feasible(tuple(configs), len(configs), ()), FirstTrials(tuple(configs)),
            len(configs), None,
        )

    def search(self, problem: Problem, likely: Sequence[Config], deadline: float) -> Books:
        """Search a problem as a tune does, with the request's number of trials.

        Args:
            problem: The problem.
            likely: What to begin with.
            deadline: When to end if there is a result, as of `time.monotonic`.
        Raises:
            EmptySpaceError: If nothing is feasible.
        """
        entry, session = self._request.entry, self.session
        variants = entry.space.of_pass(session.pass_name)
        pass_ = entry.operator.signature.pass_named(session.pass_name)
        feasible = enumerate_feasible(variants, pass_, problem, session.gpu)
        first = first_trials(variants, set(feasible.configs), likely)
        return self._search(problem, feasible, first, self._request.trials, deadline)

    def race(self, problem: Problem, configs: Sequence[Config]) -> tuple[float, ...]:
        """Time verified configs against each other, interleaved; medians in microseconds."""
        candidates = tuple(self._candidate(config, problem) for config in configs)
        finals = Finals(self.session.pass_name, problem, candidates, peers=())
        return tuple(t.median_us for t in self.session.worker.finals(finals).timings)

    def enter(self, problem: Problem, record: Record) -> Entered | None:
        """Certify a verified trial as a tune does its winners: with all inputs, on the device at
        once. Its host run goes on in the background. None if it was refused.
        """
        books = Books()
        books.enter(record)
        made = certify(self.session, problem, record, books)
        if made is None:
            return None
        assert record.timing is not None
        entered = finalist(self.session, problem, *made, record.timing)
        proof = self._prover.start(
            entered.rendered, entered.variant, entered.config, self.session.pass_name, problem
        )
        return Entered(problem, entered, proof)

    def settle(self, entered: Entered) -> Finalist:
        """Wait for the host run; the record is of a wrong config if that found a fault."""
        return with_host_run(
            self.session, entered.problem, entered.finalist, entered.proof.result()
        )

    def _search(
        self,
        problem: Problem,
        feasible: Feasible,
        first: FirstTrials,
        trials: int,
        deadline: float | None,
    ) -> Books:
        request = replace(self._request, trials=trials, problems=(problem,))
        return search_problem(
            self.session, request, problem, feasible, first, self._ahead, deadline, lambda _: None
        )

    def _candidate(self, config: Config, problem: Problem) -> Candidate:
        built = self.session.build(self.session.render(config, problem)).result()
        assert not isinstance(built, BuildFailure)  # it was verified
        return self.session.candidate(config, built)
