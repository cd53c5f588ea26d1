"""Trials of given configs on many problems, on one worker: what rules of dispatch are learnt from.

The trials are those of a search, by the same loop: built ahead, verified, timed, written down in
the journal, and not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from kgen.model.artifact import BuildFailure
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.search.feasible import Feasible, enumerate_feasible
from kgen.tune.ahead import Ahead, builds_at_once
from kgen.tune.finals import certify, finalist
from kgen.tune.first import FirstTrials, first_trials
from kgen.tune.opened import opened_session
from kgen.tune.request import Finalist, TuneRequest
from kgen.tune.search_loop import Books, search_problem
from kgen.tune.settle import with_host_run
from kgen.worker import Candidate, Finals, HostProver, Proof, Session


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

    def certified(
        self,
        trials: Sequence[tuple[Problem, Record]],
        say: Callable[[str], None],
    ) -> list[Finalist | None]:
        """Certify configs as a tune does its winners: all inputs, and a host run of each.

        Args:
            trials: Verified ones.
            say: Told of those that a host run refuses.
        Returns:
            One per trial, with the trial's timing; None for one that was refused.
        """
        entered = [self._entered(problem, record) for problem, record in trials]
        return [waiting and self._settled(*waiting, say) for waiting in entered]

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

    def _entered(
        self, problem: Problem, record: Record
    ) -> tuple[Problem, Finalist, Future[Proof]] | None:
        """Run a certificate, and start its host run."""
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
        return problem, entered, proof

    def _settled(
        self,
        problem: Problem,
        entered: Finalist,
        proof: Future[Proof],
        say: Callable[[str], None],
    ) -> Finalist | None:
        proven = with_host_run(self.session, problem, entered, proof.result())
        if proven.record.fate is Fate.VERIFIED:
            return proven
        say(f"refused {proven.config.label} at {problem}: {proven.record.reason.splitlines()[0]}")
        return None

    def _candidate(self, config: Config, problem: Problem) -> Candidate:
        built = self.session.build(self.session.render(config, problem)).result()
        assert not isinstance(built, BuildFailure)  # it was verified
        return self.session.candidate(config, built)
