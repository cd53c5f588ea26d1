"""`kgen predict` as a whole: learn, rank, compile, verify on the CPU, publish."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from kgen.assets import include_dir
from kgen.build.render import check_template
from kgen.emit import published_rows
from kgen.errors import PredictError
from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Evidence, Fate, Record
from kgen.model.space import Variant
from kgen.predict.events import (
    Compiling,
    HostRunStarted,
    PassStarted,
    Predicted,
    PredictEvent,
    Skipped,
)
from kgen.predict.features import Featurizer
from kgen.predict.models import Features
from kgen.predict.publish import Choice, publish
from kgen.predict.request import PredictRequest
from kgen.predict.training import Predictor, TrainingSearch, read_training_searches
from kgen.search.feasible import Feasible, enumerate_feasible
from kgen.trial import HostRunner, HostRunResult, Session, WorkerHandle, jobs_beside
from kgen.tune import check_folder_writable
from kgen.tune.resources import resource_refusal
from kgen.worker import Setup, TrialOutcome

MOST_PROOFS = 5
"""Most configs of a problem that get host runs; the first that passes is published."""


@dataclass(frozen=True)
class _Built:
    """A compiled config that is not refused."""

    variant: Variant
    config: Config
    rendered: Rendered
    artifact: Artifact
    features: Features


def predict(request: PredictRequest) -> Generator[PredictEvent, None, None]:
    """Predict a row for each problem, and publish it as soon as its host runs have passed.

    A problem with a measured row of this GPU is skipped.

    Yields:
        The events of `kgen.predict.events`. A caller that stops reading early must `close` the
        generator, which ends the workers.
    Raises:
        PredictError: If no search of a pass is recorded, or no config of a problem is verified.
        EmptySpaceError, TemplateError, ToolchainError, StorageError, RecordError: As named.
    """
    check_folder_writable(request.reports)
    for pass_name, problems in request.problems.items():
        yield from _predict_pass(request, pass_name, problems)


def _predict_pass(
    request: PredictRequest, pass_name: str, problems: Sequence[Problem]
) -> Iterator[PredictEvent]:
    entry = request.entry
    measured = {
        row.problem
        for row in published_rows(request.out, entry.operator.name, request.gpu.name)
        if row.is_measured
    }
    wanted = []
    for problem in problems:
        if _row_key(pass_name, problem) in measured:
            yield Skipped(pass_name, problem)
        else:
            wanted.append(problem)
    if not wanted:
        return
    variants = entry.space.of_pass(pass_name)
    for variant in variants:
        check_template(entry.templates / variant.template, variant, entry.operator.signature)
    pass_ = entry.operator.signature.pass_named(pass_name)
    spaces = [enumerate_feasible(variants, pass_, p, request.gpu) for p in wanted]
    searches = read_training_searches((entry, *request.relatives), request.libraries, pass_name)
    if not searches:
        raise _nothing_to_learn_from(request, pass_name)
    yield PassStarted(
        pass_name,
        tuple(sorted({one.searched.gpu.name for one in searches})),
        len(searches),
        sum(len(one.times_us) for one in searches),
    )
    setup = Setup(entry.operator.name, request.paths, request.gpu, 0, request.seed)
    with (
        WorkerHandle(setup, spare=False) as worker,  # never started: there is no such GPU
        HostRunner(setup, include_dir(), jobs_beside(len(os.sched_getaffinity(0)) // 2)) as runner,
    ):
        session = Session(
            entry, pass_name, request.gpu, request.compiler, request.journal, worker
        )
        session.environment = {
            "device": f"none: predicted for {request.gpu.title}",
            "compiler": f"{request.compiler.name} {request.compiler.version}",
        }
        for problem, feasible in zip(wanted, spaces, strict=True):
            yield from _ProblemPrediction(
                request, session, runner, searches, problem, feasible
            ).run()


class _ProblemPrediction:
    """The prediction of one problem."""

    def __init__(
        self,
        request: PredictRequest,
        session: Session,
        runner: HostRunner,
        searches: Sequence[TrainingSearch],
        problem: Problem,
        feasible: Feasible,
    ) -> None:
        self._request, self._session, self._runner = request, session, runner
        self._problem, self._feasible, self._searches = problem, feasible, searches
        self._predictor = Predictor(request.model, request.entry, problem, searches)
        self._features = Featurizer(
            request.entry.operator, session.pass_name, problem, request.gpu
        )
        self._refused: list[str] = []

    def run(self) -> Iterator[PredictEvent]:
        """Rank, compile, rank again, verify, publish."""
        pass_name, problem = self._session.pass_name, self._problem
        chosen = self._to_compile()
        yield Compiling(pass_name, problem, len(self._feasible.configs), len(chosen))
        built = self._built(chosen)
        order = self._predictor.order([b.features for b in built], compiled=True) if built else []
        for place in order[:MOST_PROOFS]:
            found = built[place]
            yield HostRunStarted(pass_name, problem, found.config.label)
            run = self._runner.start(
                found.rendered, found.variant, found.config, pass_name, problem
            ).result()
            record = self._recorded(found, run)
            if record is None:
                continue
            choice = Choice(
                problem, found.variant, found.config, found.rendered, found.artifact, record, run,
                self._predictor.best_us(self._features.floor_us),
                self._features.floor_us, len(self._feasible.configs), len(chosen),
                tuple(self._refused),
            )
            prediction, path = publish(self._request, pass_name, choice, self._searches)
            yield Predicted(self._request, prediction, path)
            return
        raise PredictError(
            f"{self._request.entry.operator.name} {pass_name} {problem} for "
            f"{self._request.gpu.name}: none of {len(chosen)} configs was verified on the CPU\n  "
            + "\n  ".join(self._refused)
            + "\n  next: raise --compiled, or mend what the first reason names"
        )

    def _to_compile(self) -> list[Config]:
        """The most promising configs, and the best config of each variant except the safe one."""
        configs = self._feasible.configs
        variants = {v.name: v for v in self._request.entry.space.of_pass(self._session.pass_name)}
        rows = [self._features.of(variants[c.variant], c, None) for c in configs]
        order = [configs[place] for place in self._predictor.order(rows, compiled=False)]
        heads: dict[str, Config] = {}
        for config in order:
            if variants[config.variant].safe is None:
                heads.setdefault(config.variant, config)
        most = self._request.compiled
        head = [*heads.values()][: most // 2]
        return list(dict.fromkeys([*head, *order]))[:most]

    def _built(self, configs: Sequence[Config]) -> list[_Built]:
        """Compile configs; record the reason for each that may not run."""
        session, problem = self._session, self._problem
        sources = [session.render(config, problem) for config in configs]
        builds = [session.build(rendered) for rendered in sources]
        found = []
        for config, rendered, build in zip(configs, sources, builds, strict=True):
            built = build.result()
            if isinstance(built, BuildFailure):
                self._refuse(config, f"does not compile: {built.message}")
                continue
            plan = session.plan(config, problem)
            refusal = resource_refusal(built, plan, session.gpu) or session.refusal(
                rendered, built, config)
            if refusal:
                self._refuse(config, refusal)
                continue
            variant = session.variant_of(config)
            features = self._features.of(variant, config, built.resources)
            found.append(_Built(variant, config, rendered, built, features))
        return found

    def _recorded(self, found: _Built, run: HostRunResult) -> Record | None:
        """Record a certificate; None if the host runs found a fault or were not made.

        A certificate of a GPU may lack host runs; here they are the only verification.
        """
        if run.missing and not run.fault:
            self._refuse(found.config, run.missing)
            return None
        evidence = Evidence(
            seed=self._request.seed,
            tried=(),
            skipped=(),
            launches=0,
            bitwise=not found.variant.nondeterministic,
            host=run.runs,
            host_missing=run.missing,
        )
        outcome = TrialOutcome(
            Fate.WRONG if run.fault else Fate.VERIFIED, run.fault, evidence=evidence
        )
        record = self._session.record(
            found.config, self._problem, found.rendered, outcome, found.artifact
        )
        if run.fault:
            self._refuse(found.config, run.fault)
            return None
        return record

    def _refuse(self, config: Config, why: str) -> None:
        self._refused.append(f"{config.label}: {why.splitlines()[0]}")


def _row_key(
    pass_name: str, problem: Problem
) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """The key of a row, as `RowState.problem`."""
    return (pass_name, tuple(v for _, v in problem.dtypes), tuple(v for _, v in problem.dims))


def _nothing_to_learn_from(request: PredictRequest, pass_name: str) -> PredictError:
    name = request.entry.operator.name
    places = ", ".join(dict.fromkeys(map(str, request.libraries)))
    return PredictError(
        f"no search of {name} {pass_name} on a GPU is recorded, so a model has nothing to learn "
        f"from\n  looked in: {places}\n"
        f"  next: kgen tune --op {name} --pass {pass_name} on a machine with a GPU, or name a "
        "library with such records by --from DIR"
    )
