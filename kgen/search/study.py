"""A resumable search: ask and tell on an Optuna study in a journal file or in a database."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.model.config import Config
from kgen.search.membership import Membership, is_running, start_of_process
from kgen.search.params import ParamSpace
from kgen.search.share import WHOLE, Share
from kgen.search.storage import open_journal_file

if TYPE_CHECKING:
    import optuna

    from kgen.search.sampler import FeasibleSampler

METRIC = "median_us"
_SPACE = "space"  # study user attribute: digest of the categorical choices
_BASE = "base"  # study user attribute: the requested name, without the digest's suffix
_OWNER = "owner"  # trial user attribute: the process that runs it
_BEGUN = "begun"  # trial user attribute: whether it has begun; set if processes share the study
_MEMBER = "member"  # key in `_OWNER`: the owner's identity among the member processes
_DUPLICATE_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Proposal:
    """One config to try; `number` is the Optuna trial number to tell the result to."""

    number: int
    config: Config


def open_study(
    storage_path: str | os.PathLike[str] | optuna.storages.BaseStorage,
    name: str,
    feasible: Sequence[Config],
    seed: int = 0,
    first: Sequence[Config] = (),
    *,
    prior_us: Mapping[Config, float] | None = None,
    abandoned_after_s: float = 3600.0,
    membership: Membership | None = None,
) -> Search:
    """Open or resume the study of one problem; `optuna-dashboard <storage_path>` shows it.

    Trials that a dead process of this host left running, and those that another host has not
    finished within `abandoned_after_s`, are marked failed, and their configs are free again. If the
    choices of a parameter changed, Optuna cannot continue the study: a new study `<name>-<digest>`
    starts from the results that are still feasible.

    Args:
        storage_path: Journal file; made, with its folder, if missing. Or an open storage.
        name: Study name; one problem of one pass on one GPU.
        feasible: The feasible set, enumerated; not empty.
        seed: Same seed, same history: same proposals.
        first: Configs to propose before any other (safe ones, winners elsewhere).
        prior_us: Expected times of some configs in microseconds; see `FeasibleSampler`.
        abandoned_after_s: Age at which another host's running trial counts as lost.
        membership: The processes that share the storage. A running trial of a process that is not
            among them counts as lost, whatever its age.
    Raises:
        ValueError: If the feasible set is empty.
        StorageError: If the file cannot be written.
        RecordError: If the file is damaged.
    """
    import optuna

    from kgen.search.sampler import FeasibleSampler

    storage = (
        open_journal_file(Path(storage_path))
        if isinstance(storage_path, str | os.PathLike)
        else storage_path
    )
    sampler = FeasibleSampler(feasible, seed, first, prior_us)
    if optuna.logging.get_verbosity() == optuna.logging.INFO:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # Optuna logs a line per trial
    study, fresh = _open(storage, name, sampler)
    search = Search(study, storage, sampler, membership, abandoned_after_s)
    search.running_elsewhere()
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
        membership: Membership | None = None,
        abandoned_after_s: float = 3600.0,
    ) -> None:
        self.study = study
        self._storage = storage
        self._study_id = storage.get_study_id_from_name(study.study_name)
        self._sampler = sampler
        self._membership, self._abandoned_after_s = membership, abandoned_after_s
        self._mine: set[int] = set()  # numbers of the unfinished proposals of this object

    def ask(self, n: int, at_most: int | None = None, share: Share = WHOLE) -> list[Proposal]:
        """Return up to n configs that were never tried, most promising first; [] when none is left.

        Each becomes a running trial in one write that includes its parameters, so a killed process
        leaves no partial trial. The trial claims the config: numbers are given in the order of the
        writes, and the lowest number of a config keeps it.

        Args:
            n: Most configs.
            at_most: Most configs of the study that are tried or running. If several processes ask
                at the same time, those whose trials have the highest numbers get fewer.
            share: The part of the free configs from which this process proposes. Processes that
                have seen the same results would propose the same configs.
        """
        from optuna.trial import TrialState, create_trial

        from kgen.search.sampler import DUPLICATE, PASSED_OVER

        out: list[Proposal] = []
        for _ in range(_DUPLICATE_ROUNDS):
            made: list[Proposal] = []
            for config in self._sampler.propose(self.study, n - len(out), share):
                trial_id = self._storage.create_new_trial(
                    self._study_id,
                    create_trial(
                        state=TrialState.RUNNING,
                        params=dict(self._sampler.space.to_params(config)),
                        distributions=self._sampler.distributions_of(config),
                        user_attrs={_OWNER: self._this_process()},
                    ),
                )
                made.append(Proposal(self._storage.get_trial_number_from_id(trial_id), config))
                self._mine.add(made[-1].number)
            # Another process may have proposed the same config; the lower trial number keeps it.
            holder: dict[Config, int] = {}
            for trial in self.study.get_trials(deepcopy=False):
                config_there = self._sampler.space.config_of(trial.params)
                if config_there is not None and not _is_void(trial):
                    holder.setdefault(config_there, trial.number)
            last = sorted(holder.values())[:at_most][-1:]
            full = at_most is not None and len(holder) > at_most
            for proposal in made:
                if holder.get(proposal.config) != proposal.number:
                    self._finish(proposal.number, None, DUPLICATE)
                elif full and proposal.number > max(last, default=-1):
                    self._finish(proposal.number, None, PASSED_OVER)
                else:
                    out.append(proposal)
            if len(out) >= n or not made or full:
                break
        return out

    def running_elsewhere(self) -> int:
        """Free the configs of processes that died, and count the trials that others run."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        from kgen.search.sampler import FATE, INTERRUPTED, PASSED_OVER

        count = 0
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.number in self._mine:
                continue
            if _is_live(trial, self._abandoned_after_s, self._membership):
                count += 1
                continue
            try:
                # Read again: the trial may have begun after the list was read.
                attributes = self._storage.get_trial(trial._trial_id).user_attrs
                begun = self._membership is None or attributes.get(_BEGUN)
                fate = INTERRUPTED if begun else PASSED_OVER
                self._storage.set_trial_user_attr(trial._trial_id, FATE, fate)
                self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
            except UpdateFinishedTrialError:
                continue  # another process freed it at the same time
        return count

    def begin(self, number: int) -> bool:
        """Note that a proposal's trial begins; return False if the proposal was taken away.

        A proposal is taken away if its process seemed dead, because the machine slept or lost the
        network. A trial that was never begun does not count as interrupted if its process dies.
        """
        from optuna.exceptions import UpdateFinishedTrialError

        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        try:
            self._storage.set_trial_user_attr(trial_id, _BEGUN, True)
        except UpdateFinishedTrialError:
            self._mine.discard(number)
            return False
        return True

    def tell(self, number: int, median_us: float | None, fate: str) -> None:
        """Finish a trial.

        Args:
            number: The number of the proposal.
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
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        from kgen.search.sampler import FATE

        self._mine.discard(number)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        if self._storage.get_trial(trial_id).state.is_finished():
            return  # declared abandoned by another process while it ran
        state = TrialState.FAIL if median_us is None else TrialState.COMPLETE
        values = None if median_us is None else [median_us]
        with contextlib.suppress(UpdateFinishedTrialError):  # declared abandoned just now
            self._storage.set_trial_user_attr(trial_id, FATE, fate)
            self._storage.set_trial_state_values(trial_id, state, values)

    def _this_process(self) -> dict[str, object]:
        pid = os.getpid()
        owner: dict[str, object] = {
            "host": socket.gethostname(), "pid": pid, "started": start_of_process(pid)}
        return owner if self._membership is None else owner | {_MEMBER: self._membership.id}


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


def _is_live(
    trial: optuna.trial.FrozenTrial, abandoned_after_s: float, membership: Membership | None
) -> bool:
    """Whether the process of a running trial that this search does not hold is alive."""
    owner = trial.user_attrs.get(_OWNER)
    if not isinstance(owner, dict):
        return False
    if membership is not None and _MEMBER in owner:
        # A trial of this process that this search does not hold belongs to an earlier `Search`, or
        # to a write whose answer was lost.
        return owner[_MEMBER] != membership.id and not membership.is_dead(str(owner[_MEMBER]))
    if owner.get("host") != socket.gethostname():
        started = trial.datetime_start
        if started is None:
            return False
        age = datetime.now(tz=UTC) - started.astimezone(UTC)
        return age.total_seconds() < abandoned_after_s
    # Such a trial of this very process belongs to a `Search` object that was dropped.
    return owner.get("pid") != os.getpid() and is_running(owner)
