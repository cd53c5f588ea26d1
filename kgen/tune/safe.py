"""Certify the safe variant: it answers what no table row does.

On a GPU it is built and certified for the combinations of dtypes that show every pair of choices
(`Signature.dtype_pairs`), which have a host run, too, and once for every source that none of those
has: a template may ask at run time which tensors are there. On the host, where building and running
these would take longer than a tune, only the former are built and certified: optional tensors
double the combinations each, and a mistake that needs three particular choices at once is not
looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kgen.errors import TuneError
from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.problem import Problem, with_dims
from kgen.model.record import Fate, Record
from kgen.operators.base import Operator
from kgen.trial import HostRunner, HostRunResult, Session, with_host_runs
from kgen.tune.results import SafeResult
from kgen.worker import Trial, TrialOutcome

# Small, and ragged in every power of two: the safe variant is judged on correctness alone. Dims
# over which the same work is done again are smaller still: work grows with the product.
SAFE_EXTENT = 67
FEW = 3
RAGGED_DIMS = 3  # the last ones, of an operator that does not say which dims repeat its work


@dataclass(frozen=True)
class _Claim:
    """The safe config for one combination of dtypes; what is known of it, or is being found out."""

    problem: Problem
    rendered: Rendered
    artifact: Artifact | None
    text_key: str
    shows_a_pair: bool
    known: Record | None = None
    outcome: TrialOutcome | None = None
    host_run: Future[HostRunResult] | None = None
    result: SafeResult | None = None

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The combination."""
        return dict(self.problem.dtypes)

    @property
    def needs_a_run(self) -> bool:
        """Whether it was built, and no journal has its certificate."""
        return self.artifact is not None and self.known is None


class SafeCertificates:
    """The safe config for each dtype combination that is certified: run on the device at once,
    their host runs behind what the tune does next.
    """

    def __init__(self, session: Session, host_runner: HostRunner) -> None:
        """Build and run all, and start the host runs.

        Raises:
            TuneError: If one does not build or is wrong: the library would have nothing to fall
                back on.
        """
        # Builds and host runs go on side by side, so all start before the first is waited for.
        self._session = session
        claims = [_looked_up(session, claim) for claim in _built(session)]
        outcomes = _outcomes(session, host_runner, [c for c in claims if c.needs_a_run])
        self._claims = [
            _certified_if_it_can(
                session,
                _with_host_run_started(session, host_runner, replace(c, outcome=next(outcomes))),
            )
            if c.needs_a_run
            else c
            for c in claims
        ]
        self._results: tuple[SafeResult, ...] | None = None

    @property
    def done(self) -> bool:
        """Whether `results` would not wait."""
        return all(claim.host_run is None or claim.host_run.done() for claim in self._claims)

    def results(self) -> tuple[SafeResult, ...]:
        """Wait for the host runs, and write the certificates down.

        Raises:
            TuneError: If one is wrong.
        """
        if self._results is None:
            self._results = tuple(
                claim.result or _certified(self._session, claim) for claim in self._claims
            )
        return self._results


def safe_dims(operator: Operator) -> tuple[tuple[str, int], ...]:
    """The extents that safe kernels are certified at."""
    dims = operator.signature.dims
    few = operator.repeats or [d.name for d in dims[:-RAGGED_DIMS]]
    return tuple((d.name, max(FEW if d.name in few else SAFE_EXTENT, d.smallest)) for d in dims)


def _built(session: Session) -> list[_Claim]:
    signature = session.entry.operator.signature
    variant = session.entry.space.safe_variant(session.pass_name)
    config = variant.safe
    assert config is not None
    dims = safe_dims(session.entry.operator)
    problems = [
        with_dims(Problem(dims, tuple(d.items())), {}, signature)
        for d in signature.dtype_combinations()
    ]
    sources = [session.render(config, problem) for problem in problems]
    pairs = signature.dtype_pairs()
    shown = _shown(pairs, problems, sources, every_source=not session.gpu.is_host)
    builds = [
        session.build(rendered) if problem in shown else None
        for problem, rendered in zip(problems, sources, strict=True)
    ]
    claims = []
    for problem, rendered, build in zip(problems, sources, builds, strict=True):
        built = build.result() if build is not None else None
        if isinstance(built, BuildFailure):
            raise TuneError(
                f"{variant.where}: the safe variant does not compile for {dict(problem.dtypes)}\n  "
                f"{built.message}\n  source: {built.source_path}"
            )
        if built is not None and (refusal := session.refusal(rendered, built, config)):
            raise TuneError(f"{variant.where}: the safe variant is refused: {refusal}")
        claims.append(
            _Claim(
                problem,
                rendered,
                built,
                session.text_key(rendered, config, problem),
                dict(problem.dtypes) in pairs,
            )
        )
    return claims


def _shown(
    pairs: Sequence[Mapping[str, str]],
    problems: Sequence[Problem],
    sources: Sequence[Rendered],
    *,
    every_source: bool,
) -> list[Problem]:
    """The combinations to certify: those that show every pair of choices, and if so wanted the
    first of every source that none of these has.
    """
    shown = [problem for problem in problems if dict(problem.dtypes) in pairs]
    if every_source:
        seen = {s.digest for p, s in zip(problems, sources, strict=True) if p in shown}
        for problem, source in zip(problems, sources, strict=True):
            if source.digest not in seen:
                seen.add(source.digest)
                shown.append(problem)
    return shown


def _looked_up(session: Session, claim: _Claim) -> _Claim:
    """Find the claim's certificate in the journal: of the same text, or of the same code."""
    if claim.artifact is None:
        return claim
    config = session.entry.space.safe_variant(session.pass_name).safe
    assert config is not None
    key = session.key(claim.rendered, claim.artifact, config, claim.problem)
    known = (
        r
        for r in session.journal.read()
        if (r.text_key == claim.text_key or r.key == key)
        and r.fate is Fate.VERIFIED
        and r.evidence is not None
        and r.definition in ("", session.definition)
    )
    return replace(claim, known=next(known, None))


def _outcomes(
    session: Session, host_runner: HostRunner, claims: Sequence[_Claim]
) -> Iterator[TrialOutcome]:
    """Run the claims: one after the other on a GPU. On the host they get what a GPU's have there,
    small inputs and two orders of threads, on all cores: nothing is timed at this point.
    """
    variant = session.entry.space.safe_variant(session.pass_name)
    config = variant.safe
    assert config is not None
    on_host = session.gpu.is_host
    trials = []
    for claim in claims:
        assert claim.artifact is not None
        trials.append(
            Trial(
                session.pass_name,
                claim.problem,
                session.candidate(config, claim.artifact),
                level="host" if on_host else "certify",
                measure=False,
                orders=(0, 1) if on_host else (0,),
            )
        )
    if on_host:
        running = [host_runner.trial(trial) for trial in trials]
        return iter([trial.result() for trial in running])
    return map(session.worker.trial, trials)


def _with_host_run_started(session: Session, host_runner: HostRunner, claim: _Claim) -> _Claim:
    variant = session.entry.space.safe_variant(session.pass_name)
    config = variant.safe
    assert config is not None
    assert claim.outcome is not None
    if claim.outcome.fate is not Fate.VERIFIED or not claim.shows_a_pair or session.gpu.is_host:
        return claim
    host_run = host_runner.start(claim.rendered, variant, config, session.pass_name, claim.problem)
    return replace(claim, host_run=host_run)


def _certified_if_it_can(session: Session, claim: _Claim) -> _Claim:
    """Write a certificate down at once if it needs no host run: a tune that is interrupted later
    need not make it again.
    """
    if claim.host_run is not None:
        return claim
    return replace(claim, result=_certified(session, claim))


def _certified(session: Session, claim: _Claim) -> SafeResult:
    variant = session.entry.space.safe_variant(session.pass_name)
    config = variant.safe
    assert config is not None
    record = claim.known
    outcome = claim.outcome
    if outcome is not None:
        if outcome.evidence is not None:
            outcome = _with_host_run(session, claim, outcome)
        record = session.record(
            config, claim.problem, claim.rendered, outcome, claim.artifact
        )
    if record is not None and record.fate is not Fate.VERIFIED:
        raise TuneError(
            f"{variant.where}: the safe variant is {record.fate} for {claim.problem}\n  "
            f"{record.reason}"
        )
    return SafeResult(claim.dtypes, variant, config, claim.rendered, record)


def _with_host_run(session: Session, claim: _Claim, outcome: TrialOutcome) -> TrialOutcome:
    assert outcome.evidence is not None
    if claim.host_run is not None:
        host_run = claim.host_run.result()
    elif session.gpu.is_host:
        host_run = HostRunResult(missing="it was certified on the host itself")
    else:
        host_run = HostRunResult(
            missing="other combinations of the same dtypes, two by two, have one"
        )
    outcome = replace(outcome, evidence=with_host_runs(outcome.evidence, host_run))
    return replace(outcome, fate=Fate.WRONG, reason=host_run.fault) if host_run.fault else outcome
