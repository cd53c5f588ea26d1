"""The request of a tune."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kgen.build import Compiler
from kgen.catalogue import Entry
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.record import COLD
from kgen.search.membership import GRACE_S
from kgen.search.storage import PATIENCE_S, StorageUrl

# A GPU's trial takes milliseconds; a trial on the host is slow, so its default is small.
DEFAULT_TRIALS = 160
DEFAULT_HOST_TRIALS = 12


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a trial: time and device memory.

    Attributes:
        trial_s: Seconds from the request to the verdict. The first trial of a problem also draws
            the inputs and evaluates the oracle in this time. A certificate has a multiple of it
            (`kgen.trial.handle`).
        memory_bytes: Device memory that all trials may use; None: all of it.
    """

    trial_s: float = 30.0
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """The shared storage of a joint tune.

    Attributes:
        url: The storage.
        grace_s: Seconds without a heartbeat after which a process counts as dead.
        patience_s: Seconds to wait for a storage that does not answer.
    """

    url: StorageUrl
    grace_s: float = GRACE_S
    patience_s: float = PATIENCE_S


@dataclass(frozen=True)
class TuneRequest:
    """One tune of an operator on one GPU. Every step of the tune reads this same object.

    Attributes:
        entry: The operator with its space and templates.
        passes: `forward`, `backward` or both, in the order in which they are tuned.
        problems: The problems by pass, in the order in which they are searched.
        gpu: Profile of the device to tune on.
        ordinal: CUDA device ordinal.
        compiler: Back end; it also determines the build cache.
        journal: Path of the trial journal.
        study: Path of the Optuna journal file.
        trials: Most trials per problem.
        time_s: Seconds for the searches and finals of all passes together; None: no limit.
        seed: The seed of proposals and inputs.
        paths: The `--path` folders, for the worker.
        against: Names of the peers to time beside the winner; None: all that are installed.
        l2: `cold` or `warm`: what L2 holds while a kernel is timed.
        limits: The limits of a trial.
        retry: Try again the configs that crashed or timed out in earlier tunes; without it, such
            configs are quarantined as long as they render to the same code.
        shared: The storage through which other processes help this tune; None: it works alone.
        retry_name: Name of the studies of a joint retry; empty if there is none.
        certificates: Further journals of the operator and GPU. Configs that are certified there are
            not certified again. Winners in these journals' folders are tried first; results are
            taken from `journal` only.
        served: The config that the library runs now, by pass and problem; it is tried first.
    """

    entry: Entry
    passes: tuple[str, ...]
    problems: Mapping[str, tuple[Problem, ...]]
    gpu: GpuProfile
    ordinal: int
    compiler: Compiler
    journal: Path
    study: Path
    trials: int
    time_s: float | None
    seed: int
    paths: tuple[str, ...]
    against: tuple[str, ...] | None = None
    l2: str = COLD
    limits: Limits = field(default_factory=Limits)
    retry: bool = False
    shared: SharedStorage | None = None
    retry_name: str = ""
    certificates: tuple[Path, ...] = ()
    served: Mapping[tuple[str, str], Config] = field(default_factory=dict)

    @property
    def pass_time_s(self) -> float | None:
        """Seconds for the searches and finals of one pass, or None."""
        return None if self.time_s is None else self.time_s / len(self.passes)


def command_options(request: TuneRequest) -> str:
    """The command-line options with which another command finds the same operator and library."""
    options = [f" --path {shlex.quote(path)}" for path in request.paths]
    # <out>/kgen_ops/<operator>/reports/<gpu>.trials.jsonl
    places = request.journal.parents
    if len(places) > 3 and places[2].name == "kgen_ops" and str(places[3]) != "generated":
        options.append(f" --out {shlex.quote(str(places[3]))}")
    if request.compiler.name == "nvcc":  # the other compilers are defaults of their devices
        options.append(" --compiler nvcc")
    return "".join(options)


def journal_path(reports: Path, gpu: GpuProfile) -> Path:
    """The path of an operator's journal for a GPU."""
    return reports / f"{gpu.name}.trials.jsonl"


def study_path(reports: Path, gpu: GpuProfile) -> Path:
    """The path of the Optuna study that belongs to the journal."""
    return reports / f"{gpu.name}.optuna.log"


def default_trials(gpu: GpuProfile) -> int:
    """Trials per problem if the user gives no number."""
    return DEFAULT_HOST_TRIALS if gpu.is_host else DEFAULT_TRIALS
