"""A resumable search: ask and tell on an Optuna study in a journal file."""

from __future__ import annotations

import math
import os
import socket
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kgen.errors import KgenError, RecordError
from kgen.model.config import Config
from kgen.search.lock import FileLock
from kgen.search.params import ParamSpace
from kgen.search.study_file import StudyFile

if TYPE_CHECKING:
    import optuna

    from kgen.search.sampler import FeasibleSampler

METRIC = "median_us"
_SPACE = "space"  # study user attribute: digest of the categorical choices
_BASE = "base"  # study user attribute: the name asked for, without the digest's suffix
_OWNER = "owner"  # trial user attribute: the process that runs it
_DUPLICATE_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Proposal:
    """One config to try; `number` is the Optuna trial number to tell the result to."""

    number: int
    config: Config


def open_study(
    storage_path: str | os.PathLike[str],
    name: str,
    feasible: Sequence[Config],
    seed: int = 0,
    first: Sequence[Config] = (),
    *,
    prior_us: Mapping[Config, float] | None = None,
    abandoned_after_s: float = 3600.0,
) -> Search:
    """Open or resume the study of one problem; `optuna-dashboard <storage_path>` shows it.

    Trials that a dead process of this host left running, and those that another host has not
    finished within `abandoned_after_s`, are marked failed, and their configs are free again. If the
    choices of a parameter changed, Optuna cannot continue the study: a new study `<name>-<digest>`
    starts from the results that are still feasible.

    Args:
        storage_path: Journal file; made, with its folder, if missing.
        name: Study name; one problem of one pass on one GPU.
        feasible: The feasible set, enumerated; not empty.
        seed: Same seed, same history: same proposals.
        first: Configs to propose before any other (safe ones, winners elsewhere).
        prior_us: Expected times of some configs in microseconds; see `FeasibleSampler`.
        abandoned_after_s: Age at which another host's running trial counts as lost.
    Raises:
        ValueError: If the feasible set is empty.
        StorageError: If the file cannot be written.
        RecordError: If the file is damaged.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from kgen.search.sampler import FeasibleSampler

    path = Path(storage_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _mend(path)
    sampler = FeasibleSampler(feasible, seed, first, prior_us)
    backend = JournalFileBackend(str(path), lock_obj=cast(Any, FileLock(str(path))))
    try:
        storage = JournalStorage(cast(Any, StudyFile(str(path), backend)))
    except (KgenError, OSError):
        raise
    except Exception as problem:  # Optuna takes what it reads to be whole
        raise RecordError(
            f"{path}: the study is damaged ({type(problem).__name__}: {problem})\n"
            "  next: delete the file; the next tune writes it anew from the journal beside it"
        ) from None
    if optuna.logging.get_verbosity() == optuna.logging.INFO:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # Optuna logs a line per trial
    study, fresh = _open(storage, name, sampler)
    _fail_abandoned(study, storage, abandoned_after_s)
    search = Search(study, storage, sampler)
    if fresh and study.study_name != name:
        search.add_known(_earlier_results(storage, name, sampler.space))
    return search


class Search:
    """Ask for configs, tell their times. One per study and process; not shared by threads."""

    def __init__(
        self,
        study: optuna.Study,
        storage: optuna.storages.BaseStorage,
        sampler: FeasibleSampler,
    ) -> None:
        self.study = study
        self._storage = storage
        self._study_id = storage.get_study_id_from_name(study.study_name)
        self._sampler = sampler

    def ask(self, n: int) -> list[Proposal]:
        """Return up to n configs that were never tried, most promising first; [] when none is left.

        Each becomes a running trial in one write that includes its parameters, so a killed process
        leaves no partial trial.
        """
        from optuna.trial import TrialState, create_trial

        from kgen.search.sampler import DUPLICATE

        out: list[Proposal] = []
        for _ in range(_DUPLICATE_ROUNDS):
            made: list[Proposal] = []
            for config in self._sampler.propose(self.study, n - len(out)):
                trial_id = self._storage.create_new_trial(
                    self._study_id,
                    create_trial(
                        state=TrialState.RUNNING,
                        params=dict(self._sampler.space.to_params(config)),
                        distributions=self._sampler.distributions_of(config),
                        user_attrs={_OWNER: _this_process()},
                    ),
                )
                made.append(Proposal(self._storage.get_trial_number_from_id(trial_id), config))
            # Another process may have proposed the same config; the lower trial number keeps it.
            holder: dict[Config, int] = {}
            for trial in self.study.get_trials(deepcopy=False):
                config_there = self._sampler.space.config_of(trial.params)
                if config_there is not None and not _is_void(trial):
                    holder.setdefault(config_there, trial.number)
            for proposal in made:
                if holder[proposal.config] == proposal.number:
                    out.append(proposal)
                else:
                    self._finish(proposal.number, None, DUPLICATE)
            if len(out) >= n or not made:
                break
        return out

    def tell(self, number: int, median_us: float | None, fate: str) -> None:
        """Finish a trial.

        Args:
            number: Of the proposal.
            median_us: Median time in microseconds; None if the config gave none.
            fate: `verified`, `rejected`, `build_failed`, ...
        Raises:
            ValueError: If the time is not positive and finite.
        """
        if median_us is not None and not (math.isfinite(median_us) and median_us > 0):
            raise ValueError(f"trial {number}: median_us is {median_us}; want > 0, or None")
        self._finish(number, median_us, fate)

    def release(self, number: int) -> None:
        """Finish a trial that was not run; its config may be proposed again."""
        from kgen.search.sampler import PASSED_OVER

        self._finish(number, None, PASSED_OVER)

    def pass_over(self, variant: str) -> None:
        """Drop a variant's remaining `first` configs; the model may still propose them."""
        self._sampler.pass_over(variant)

    def add_known(self, results: Iterable[tuple[Config, float | None]]) -> int:
        """Add finished results of another run, None for a config that failed.

        Results outside the feasible set, and of configs that the study has already, are ignored.

        Returns:
            The number of added results.
        """
        from optuna.trial import TrialState, create_trial

        from kgen.search.sampler import FATE

        space = self._sampler.space
        present = {
            space.config_of(trial.params)
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.is_finished() and not _is_void(trial)
        }
        trials = []
        for config, median_us in results:
            config = space.normal(config)
            if config in present or self._sampler.index(config) is None:
                continue
            present.add(config)
            trials.append(
                create_trial(
                    state=TrialState.FAIL if median_us is None else TrialState.COMPLETE,
                    value=median_us,
                    params=dict(space.to_params(config)),
                    distributions=self._sampler.distributions_of(config),
                    user_attrs={FATE: "failed" if median_us is None else "verified", "known": True},
                )
            )
        self.study.add_trials(trials)
        return len(trials)

    def results(self) -> list[tuple[Config, float | None]]:
        """Return the finished trials of the feasible set in order; None for those that failed."""
        return [
            (config, median_us)
            for config, median_us in _results_of(self.study, self._sampler.space)
            if self._sampler.index(config) is not None
        ]

    def best(self) -> tuple[Config, float] | None:
        """Return the fastest config so far and its median in microseconds."""
        timed = [(c, t) for c, t in self.results() if t is not None]
        return min(timed, key=lambda pair: pair[1], default=None)

    def _finish(self, number: int, median_us: float | None, fate: str) -> None:
        from optuna.trial import TrialState

        from kgen.search.sampler import FATE

        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        if self._storage.get_trial(trial_id).state.is_finished():
            return  # declared abandoned by another process while it ran
        self._storage.set_trial_user_attr(trial_id, FATE, fate)
        state = TrialState.FAIL if median_us is None else TrialState.COMPLETE
        values = None if median_us is None else [median_us]
        self._storage.set_trial_state_values(trial_id, state, values)


def _is_void(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether the trial has no result of its config."""
    return trial.user_attrs.get("fate") in ("interrupted", "duplicate", "passed over")


def _results_of(study: optuna.Study, space: ParamSpace) -> list[tuple[Config, float | None]]:
    out: list[tuple[Config, float | None]] = []
    for trial in study.get_trials(deepcopy=False):
        config = space.config_of(trial.params)
        if config is not None and trial.state.is_finished() and not _is_void(trial):
            out.append((config, trial.value))
    return out


def _open(
    storage: optuna.storages.BaseStorage, name: str, sampler: FeasibleSampler
) -> tuple[optuna.Study, bool]:
    """Return the study of the current choices, and whether it is new."""
    import optuna

    digest = sampler.space.digest
    for candidate in (name, f"{name}-{digest}"):
        study = optuna.create_study(
            storage=storage, sampler=sampler, study_name=candidate, load_if_exists=True
        )
        if _SPACE not in study.user_attrs:  # new, or being made by another process right now
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([METRIC])
            study.set_user_attr(_BASE, name)
            study.set_user_attr(_SPACE, digest)
            return study, True
        if study.user_attrs[_SPACE] == digest:
            return study, False
    raise AssertionError("a study named after its digest has another digest")


def _earlier_results(
    storage: optuna.storages.BaseStorage, name: str, space: ParamSpace
) -> list[tuple[Config, float | None]]:
    """Return the results of all earlier studies of this base name, newest study first."""
    import optuna

    out: list[tuple[Config, float | None]] = []
    for frozen in reversed(storage.get_all_studies()):
        if frozen.user_attrs.get(_BASE) == name:
            study = optuna.load_study(study_name=frozen.study_name, storage=storage)
            out += _results_of(study, space)
    return out


def _fail_abandoned(
    study: optuna.Study, storage: optuna.storages.BaseStorage, abandoned_after_s: float
) -> None:
    """Mark running trials of dead processes failed; they would bias later proposals."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _is_live(trial, abandoned_after_s):
            continue
        try:
            storage.set_trial_user_attr(trial._trial_id, "fate", "interrupted")
            storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            continue  # another process opened the study at the same time


def _is_live(trial: optuna.trial.FrozenTrial, abandoned_after_s: float) -> bool:
    owner = trial.user_attrs.get(_OWNER)
    if not isinstance(owner, dict):
        return False
    if owner.get("host") != socket.gethostname():
        started = trial.datetime_start
        if started is None:
            return False
        age = datetime.now(tz=UTC) - started.astimezone(UTC)
        return age.total_seconds() < abandoned_after_s
    pid = owner.get("pid")
    # Trials of this process from before belong to a Search object that was dropped.
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return owner.get("started") == _start_of(pid)  # the system may reuse a pid


def _this_process() -> dict[str, object]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": _start_of(pid)}


def _start_of(pid: int) -> str | None:
    """Return a process's start in clock ticks since boot; None without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _mend(path: Path) -> None:
    """Remove a last line that a killed process wrote only in part.

    Optuna would append the next record to it, and could then read neither.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    lock = FileLock(str(path))
    lock.acquire()
    try:
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(size - 1)
            if file.read(1) == b"\n":
                return
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
    finally:
        lock.release()
