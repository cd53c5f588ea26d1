"""The steps of a trial in the parent: render, compute its key, run in the worker, record."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from kgen.assets import include_dir
from kgen.build import Compiler
from kgen.build.render import Renderer
from kgen.catalogue import Entry
from kgen.errors import KgenError
from kgen.journal import Journal
from kgen.model.artifact import Artifact, BuildFailure, BuildRequest, Rendered
from kgen.model.config import Config
from kgen.model.digest import digest_of
from kgen.model.gpu import GpuProfile
from kgen.model.plan import Plan, make_plan
from kgen.model.problem import Problem
from kgen.model.record import COLD, WARM, Fate, Record
from kgen.model.space import Variant
from kgen.runtime.cache import read_file
from kgen.runtime.code_digest import Code, code_of
from kgen.trial.definition import definition_digest, guards_digest, trained_digest
from kgen.trial.handle import WorkerHandle
from kgen.trial.kept_certificates import KeptCertificates
from kgen.trial.kept_state import kept_state
from kgen.trial.proof_rules import are_current, proof_rules
from kgen.trial.told_apart import told_apart
from kgen.worker.messages import Candidate, Level, Trial, TrialOutcome


class Session:
    """The tools of trials of one pass on one GPU. The worker serves one thread at a time.

    Attributes:
        entry: The operator with its space and templates.
        pass_name: `forward` or `backward`.
        gpu: Profile of the device.
        compiler: Back end.
        journal: The journal that records are appended to.
        worker: The process that runs trials.
        l2: `cold` or `warm`: the state of L2 in which the worker times kernels.
        environment: Facts of the machine, from the worker's probe.
        definition: Digest of the operator's definition and inputs.
        trained: Digest of how the operator draws the inputs of a trained model; empty if it
            declares none.
    """

    def __init__(
        self,
        entry: Entry,
        pass_name: str,
        gpu: GpuProfile,
        compiler: Compiler,
        journal: Path,
        worker: WorkerHandle,
        l2: str = COLD,
        certificates: Sequence[Path] = (),
    ) -> None:
        """Prepare.

        Args:
            entry, pass_name, gpu, compiler, journal, worker, l2: See the attributes.
            certificates: Further journals in which `certificate` looks.
        """
        self.entry = entry
        self.pass_name = pass_name
        self.gpu = gpu
        self.compiler = compiler
        self.worker = worker
        self.l2 = l2
        self.journal = Journal(journal)
        self.environment: dict[str, str] = {}
        self.definition = definition_digest(entry.operator)
        self.trained = trained_digest(entry.operator)
        self._renderer = Renderer(include_dir())
        self._content: dict[str, str] = {}
        self._codes: dict[str, Code] = {}
        self._guards: dict[str, str] = {}  # by variant
        self._kept = KeptCertificates(certificates, self._is_current)

    def probe(self) -> float:
        """Read the machine's facts into `environment`; return its copy bandwidth in GB/s.

        Raises:
            WorkerError: If the device cannot be used.
        """
        outcome = self.worker.probe()
        self.environment = {
            **outcome.facts,
            "compiler": f"{self.compiler.name} {self.compiler.version}",
        }
        return outcome.copy_gbps

    def variant_of(self, config: Config) -> Variant:
        """The variant that a config belongs to."""
        return self.entry.space.variant(self.pass_name, config.variant)

    def guards(self, config: Config) -> str:
        """Digest of the calls that a config's variant admits."""
        if config.variant not in self._guards:
            self._guards[config.variant] = guards_digest(self.variant_of(config))
        return self._guards[config.variant]

    def render(self, config: Config, problem: Problem) -> Rendered:
        """Render a config.

        Raises:
            TemplateError: If the template is at fault.
        """
        return self._renderer.render(
            self.entry.operator.name, self.entry.templates, self.variant_of(config), config, problem
        )

    def build(self, rendered: Rendered) -> Future[Artifact | BuildFailure]:
        """Start a build for this GPU; the compiler's threads do the work."""
        return self.compiler.submit(BuildRequest(rendered, self.gpu.arch))

    def plan(self, config: Config, problem: Problem) -> Plan:
        """Evaluate a config's launches."""
        return make_plan(self.variant_of(config), config, problem, self.gpu)

    def text_key(self, rendered: Rendered, config: Config, problem: Problem) -> str:
        """Identity of a trial by its text, known before anything is built."""
        artifact_key = self.compiler.key(BuildRequest(rendered, self.gpu.arch))
        return text_key(artifact_key, problem, self.plan(config, problem), self.l2)

    def key(
        self, rendered: Rendered, artifact: Artifact, config: Config, problem: Problem
    ) -> str:
        """Identity of a trial by its code."""
        return self._key(rendered, artifact, config, problem, self.l2)

    def _key(
        self, rendered: Rendered, artifact: Artifact, config: Config, problem: Problem, l2: str
    ) -> str:
        code = self.code(rendered, artifact)
        compiler = self.compiler.identity(self.gpu.arch)
        return trial_key(code, compiler, problem, self.plan(config, problem), l2)

    def certificate(
        self, rendered: Rendered, artifact: Artifact, config: Config, problem: Problem
    ) -> Record | None:
        """The record that certifies a build on this GPU by the current rules.

        Its host runs may be missing, or may have been made from another text: see
        `HostRunner.start`.

        Returns:
            A record of the session's journal or of another one; None if the build has no
            certificate.
        """
        # A certificate holds no time, so the state of L2 in an earlier tune does not matter.
        keys = [self._key(rendered, artifact, config, problem, l2) for l2 in (COLD, WARM)]
        return self._kept.find(self.journal, keys)

    def holds(self, record: Record) -> bool:
        """Whether a record that `certificate` returned is in the session's own journal."""
        return self._kept.is_own(record)

    def _is_current(self, record: Record) -> bool:
        """Whether a record is of this pass and GPU, with the current digests of its verdict."""
        if record.evidence is not None and not are_current(record.evidence.rules):
            return False
        its = (record.operator, record.pass_name, record.gpu, record.definition)
        if its != (self.entry.operator.name, self.pass_name, self.gpu.name, self.definition):
            return False
        try:
            return bool(self.definition) and record.guards == self.guards(record.config)
        except KgenError:  # the config's variant no longer exists
            return False

    def code(self, rendered: Rendered, artifact: Artifact) -> Code:
        """The code digest of a build; for the host, the digest of the text without comments."""
        if artifact.kind != "cubin":
            return Code(rendered.bare, {})
        if artifact.path not in self._codes:
            self._codes[artifact.path] = code_of(read_file(artifact.path))
        return self._codes[artifact.path]

    def refusal(self, rendered: Rendered, artifact: Artifact, config: Config) -> str:
        """The reason why a build must not run; empty if it may run."""
        return told_apart(rendered) or kept_state(rendered, artifact, self.variant_of(config))

    def candidate(self, config: Config, artifact: Artifact) -> Candidate:
        """The candidate that is sent to the worker; it holds all that is needed to run a config."""
        return Candidate(self.variant_of(config), config, artifact)

    def code_identity(self, artifact: Artifact, plan: Plan) -> str:
        """Identity of the machine code and its launches: configs that share it are one kernel."""
        if artifact.path not in self._content:
            self._content[artifact.path] = hashlib.sha256(read_file(artifact.path)).hexdigest()
        return digest_of([self._content[artifact.path], repr(plan)])

    def run(
        self,
        candidate: Candidate,
        problem: Problem,
        *,
        give_up_above_us: float | None = None,
        level: Level = "trial",
        measure: bool = True,
        seeds: tuple[int, int] | None = None,
        trained_below_us: float | None = None,
    ) -> TrialOutcome:
        """Run a trial in the worker."""
        outcome = self.worker.trial(
            Trial(
                self.pass_name, problem, candidate, give_up_above_us, level, measure, seeds=seeds,
                trained_below_us=trained_below_us,
            )
        )
        is_whole = outcome.timing is not None and outcome.timing.others
        return replace(outcome, trained=self.trained) if is_whole else outcome

    def record(
        self,
        config: Config,
        problem: Problem,
        rendered: Rendered,
        outcome: TrialOutcome,
        artifact: Artifact | None = None,
    ) -> Record:
        """Build a record of an outcome and append it to the journal."""
        evidence = outcome.evidence
        if evidence is not None and not evidence.rules:
            evidence = replace(evidence, rules=proof_rules())
        record = Record(
            key=self.key(rendered, artifact, config, problem) if artifact else "",
            text_key=self.text_key(rendered, config, problem),
            operator=self.entry.operator.name,
            pass_name=self.pass_name,
            problem=str(problem),
            gpu=self.gpu.name,
            config=config,
            fate=outcome.fate,
            reason=outcome.reason,
            source=rendered.digest,
            code=self.code(rendered, artifact).digest if artifact else "",
            environment=digest_of(self.environment),
            definition=self.definition,
            guards=self.guards(config),
            trained=outcome.trained,
            resources=artifact.resources if artifact else (),
            timing=outcome.timing,
            accuracy=outcome.accuracy,
            evidence=evidence,
            when=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        self.journal.append(record)
        return record

    def renew(
        self, record: Record, config: Config, problem: Problem, rendered: Rendered
    ) -> Record:
        """Append an earlier record again, for a text that compiles to the same machine code.

        The record keeps its id, unless the text belongs to another config.
        """
        renewed = replace(
            record,
            config=config,
            source=rendered.digest,
            text_key=self.text_key(rendered, config, problem),
            id=record.id if record.config == config else "",
        )
        self.journal.append(renewed)
        return renewed


def failed_build(failure: BuildFailure) -> TrialOutcome:
    """The outcome of a source that does not compile."""
    return TrialOutcome(Fate.BUILD_FAILED, f"{failure.message}\n  source: {failure.source_path}")


def trial_key(
    code: Code, compiler: str, problem: Problem, plan: Plan, l2: str = COLD
) -> str:
    """The key of a trial: code, compiler (version, flags, arch), problem, launches, state of L2.

    A cold time is not reused for a warm tune. The key contains no names of kgen: kernels are
    identified by their code, workspaces by their position.
    """
    places = {w.name: f"workspace {place}" for place, w in enumerate(plan.workspaces)}
    launches = [
        [
            code.functions.get(x.kernel, x.kernel),
            x.grid,
            x.block,
            x.smem_bytes,
            [places.get(arg, arg) if isinstance(arg, str) else arg for arg in x.args],
            x.pdl,
        ]
        for x in plan.launches
    ]
    workspaces = [[w.dtype, w.elements] for w in plan.workspaces]
    return digest_of([code.digest, compiler, str(problem), launches, workspaces, l2])


def text_key(artifact_key: str, problem: Problem, plan: Plan, l2: str = COLD) -> str:
    """Like `trial_key`, but from the text: `artifact_key` covers source, compiler, flags and arch.

    Its form has not changed since before `trial_key` existed, so journals of that time stay valid.
    """
    launches = [[x.kernel, x.grid, x.block, x.smem_bytes, x.args] for x in plan.launches]
    workspaces = [[w.name, w.dtype, w.elements] for w in plan.workspaces]
    # `cold` is left out, as in keys from before the choice between cold and warm existed.
    timed = [] if l2 == COLD else [["l2", l2]]
    return digest_of([artifact_key, str(problem), launches, workspaces, *timed])
