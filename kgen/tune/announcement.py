"""The announcement of a tune in the storage, which workers read to join."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kgen.errors import StorageError
from kgen.tune.joint import Joint
from kgen.tune.request import TuneRequest

if TYPE_CHECKING:
    import optuna

TUNES_STUDY = "kgen/tunes"
_SPEC, _TUNER = "tune", "tuner"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class TuneSpec:
    """The description of a tune for workers: its request without the machine.

    Attributes:
        operator: Operator name; a worker finds the module itself.
        passes: The passes, in the order in which they are tuned.
        problems: The problems, by pass.
        gpu: Profile that the tuner tunes for. A worker with another GPU has its own studies.
        compiler: Back end.
        trials, seed, l2, trial_s, memory_bytes: See `TuneRequest` and `Limits`.
        retry: If not empty, configs that crashed or timed out are tried again, in studies with this
            name.
    """

    operator: str
    passes: tuple[str, ...]
    problems: Mapping[str, tuple[str, ...]]
    gpu: str
    compiler: str
    trials: int
    seed: int
    l2: str
    trial_s: float
    memory_bytes: int | None
    retry: str


@dataclass(frozen=True, slots=True)
class OpenTune:
    """An announced tune that other processes may help.

    Attributes:
        number: Number of its trial in the study of tunes.
        spec: The description of the tune.
        tuner: The process that makes its finals, by its identity among the member processes.
    """

    number: int
    spec: TuneSpec
    tuner: str


def spec_of(request: TuneRequest) -> TuneSpec:
    """The description of a request for other processes."""
    return TuneSpec(
        operator=request.entry.operator.name,
        passes=request.passes,
        problems={name: tuple(map(str, request.problems[name])) for name in request.passes},
        gpu=request.gpu.name,
        compiler=request.compiler.name,
        trials=request.trials,
        seed=request.seed,
        l2=request.l2,
        trial_s=request.limits.trial_s,
        memory_bytes=request.limits.memory_bytes,
        retry=request.retry_name,
    )


class Announcement:
    """A tuner's call for help. Use as a context manager; without `Joint` it does nothing.

    A tuner that dies leaves its call behind: workers finish the searches. The next tuner with the
    same request replaces the call.
    """

    def __init__(self, joint: Joint | None, request: TuneRequest) -> None:
        self._joint, self._request = joint, request
        self._trial_id = 0

    def __enter__(self) -> Announcement:
        from optuna.trial import TrialState, create_trial

        if self._joint is None:
            return self
        storage = self._joint.storage
        study_id = _study_id(storage)
        spec = spec_of(self._request)
        for earlier in open_tunes(storage):
            if earlier.spec == spec and self._joint.membership.is_dead(earlier.tuner):
                self._end(storage.get_trial_id_from_study_id_trial_number(
                    study_id, earlier.number))
        data = {"format": _FORMAT, **asdict(spec)}
        trial = create_trial(state=TrialState.RUNNING, user_attrs={
            _SPEC: data, _TUNER: self._joint.membership.id})
        self._trial_id = storage.create_new_trial(study_id, trial)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Withdraw the announcement. The workers' results are in the log of records."""
        if self._joint is None:
            return
        try:
            self._end(self._trial_id)
        except StorageError:
            if error is None:
                raise  # after an error inside the block, that error is the informative one

    def _end(self, trial_id: int) -> None:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        assert self._joint is not None
        with contextlib.suppress(UpdateFinishedTrialError):  # another tuner was first
            self._joint.storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [0.0])


def open_tunes(storage: optuna.storages.BaseStorage) -> list[OpenTune]:
    """The announced tunes, oldest first."""
    from optuna.trial import TrialState

    found = []
    running = (TrialState.RUNNING,)
    for trial in storage.get_all_trials(_study_id(storage), deepcopy=False, states=running):
        data = trial.user_attrs.get(_SPEC)
        if isinstance(data, dict) and data.get("format") == _FORMAT:
            tuner = str(trial.user_attrs.get(_TUNER, ""))
            found.append(OpenTune(trial.number, _spec(data), tuner))
    return found


def is_open(storage: optuna.storages.BaseStorage, tune: OpenTune) -> bool:
    """Whether a tune is still announced."""
    study_id = _study_id(storage)
    trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, tune.number)
    return not storage.get_trial(trial_id).state.is_finished()


def _spec(data: Mapping[str, Any]) -> TuneSpec:
    fields = {name: value for name, value in data.items() if name != "format"}
    fields["passes"] = tuple(fields["passes"])
    fields["problems"] = {name: tuple(texts) for name, texts in fields["problems"].items()}
    return TuneSpec(**fields)


def _study_id(storage: optuna.storages.BaseStorage) -> int:
    import optuna

    study = optuna.create_study(storage=storage, study_name=TUNES_STUDY, load_if_exists=True)
    return storage.get_study_id_from_name(study.study_name)
