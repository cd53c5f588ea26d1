"""The processes that work on the studies of one storage, and which of them are alive.

Each process is a running trial of the study `kgen/members`. A thread writes the attribute `beat` of
that trial every few seconds. A process is dead if its trial is finished, if it ran on this machine
and its pid is gone, or if its beat has not changed for `grace_s` seconds of the observer's own
clock: clocks of different machines are never compared. If an observer has not read the beats for
long, because the server was down or the observer was busy, it counts at most half of `grace_s` for
that time: the others may have been unable to beat as well, or may beat again right now.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.errors import StorageError

if TYPE_CHECKING:
    import optuna

MEMBERS_STUDY = "kgen/members"
BEAT_S, GRACE_S = 5.0, 60.0
_READ_EVERY_S = 1.0
_ID, _BEAT, _MACHINE = "id", "beat", "machine"


@dataclass(frozen=True, slots=True)
class Member:
    """A process that works on the studies of the storage.

    Attributes:
        id: Its identity, never used again.
        number: Its number in the order of joining.
        facts: The facts that it publishes about itself: host, pid, GPU, device.
    """

    id: str
    number: int
    facts: Mapping[str, Any]


class Membership:
    """This process among the others of a storage. Use as a context manager; leaving frees claims.

    Attributes:
        id: Identity of this process.
        number: Its number in the order of joining.
    """

    def __init__(
        self,
        storage: optuna.storages.BaseStorage,
        facts: Mapping[str, Any],
        *,
        beat_s: float = BEAT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        """Prepare; `__enter__` joins.

        Args:
            storage: The storage of the studies.
            facts: The facts that other processes may read about this one; plain data.
            beat_s: Seconds between two heartbeats.
            grace_s: Seconds without a heartbeat after which a process counts as dead.
        """
        self.id = uuid.uuid4().hex[:12]
        self.number = 0
        self._storage, self._facts = storage, dict(facts)
        self._beat_s, self._grace_s = beat_s, grace_s
        self._study_id = 0
        self._trial_id = 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="kgen-heartbeat")
        self._seen: dict[str, tuple[object, float]] = {}  # beat, and seconds of silence since
        self._alive: dict[str, Member] = {}
        self._known: set[str] = set()  # the processes that ever joined, as of the last read
        self._read_at = 0.0

    def __enter__(self) -> Membership:
        import optuna
        from optuna.trial import TrialState, create_trial

        study = optuna.create_study(
            storage=self._storage, study_name=MEMBERS_STUDY, load_if_exists=True
        )
        self._study_id = self._storage.get_study_id_from_name(study.study_name)
        self._trial_id = self._storage.create_new_trial(
            self._study_id,
            create_trial(
                state=TrialState.RUNNING,
                user_attrs={
                    **self._facts, _ID: self.id, _BEAT: 0, _MACHINE: machine_id(),
                    "host": socket.gethostname(), "pid": os.getpid(), "started": start_of_process(
                        os.getpid()),
                },
            ),
        )
        self.number = self._storage.get_trial_number_from_id(self._trial_id)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Leave: the running trials of this process count as free from now on."""
        from optuna.trial import TrialState

        self._left.set()
        try:
            self._storage.set_trial_state_values(self._trial_id, TrialState.COMPLETE, [0.0])
        except StorageError:
            if error is None:
                raise  # after an error in the block, that error counts; the beats end in any case
        self._thread.join(timeout=self._beat_s)

    def publish(self, key: str, value: Any) -> None:
        """Make a fact about this process known to the others."""
        self._storage.set_trial_user_attr(self._trial_id, key, value)

    def members(self) -> list[Member]:
        """The processes that are alive, this one included, in the order in which they joined."""
        self._read()
        return sorted(self._alive.values(), key=lambda member: member.number)

    def is_dead(self, member: str) -> bool:
        """Whether the process with that identity has left or died.

        An unknown identity causes a new read: a process may claim a trial within a second after it
        joined.
        """
        self._read(now=member not in self._known)
        return member not in self._alive

    def _read(self, now: bool = False) -> None:
        """Read the heartbeats, at most once a second unless they are wanted `now`."""
        if not now and self._alive and time.monotonic() - self._read_at < _READ_EVERY_S:
            return
        alive: dict[str, Member] = {}
        trials = self._storage.get_all_trials(self._study_id, deepcopy=False)  # may take long
        read_at = time.monotonic()
        passed_s = min(read_at - self._read_at, self._grace_s / 2)
        for trial in trials:
            facts = trial.user_attrs
            member = str(facts.get(_ID, ""))
            self._known.add(member)
            if trial.state.is_finished() or not member:
                continue
            if member != self.id and self._is_silent(member, facts, passed_s):
                continue
            alive[member] = Member(member, trial.number, facts)
        self._alive, self._read_at = alive, read_at

    def _is_silent(self, member: str, facts: Mapping[str, Any], passed_s: float) -> bool:
        """Whether a process that has not left is dead.

        Args:
            member: Its identity.
            facts: The facts that it publishes about itself.
            passed_s: Seconds that count since the beats were last read.
        """
        if facts.get(_MACHINE) == machine_id() and not is_running(facts):
            return True
        beat = facts.get(_BEAT)
        before, silent_s = self._seen.get(member, (None, 0.0))
        silent_s = silent_s + passed_s if before == beat else 0.0
        self._seen[member] = (beat, silent_s)
        return silent_s > self._grace_s

    def _beat(self) -> None:
        count = 0
        while not self._left.wait(self._beat_s):
            count += 1
            try:
                self._storage.set_trial_user_attr(self._trial_id, _BEAT, count)
            except Exception:
                continue  # the search itself tells the user that the storage is gone


def machine_id() -> str:
    """Identity of the machine, its boot and its process namespace, within which pids are unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (it names no file)
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()} {boot} {namespace}"


def is_running(process: Mapping[str, Any]) -> bool:
    """Whether a process of this machine, given by `pid` and `started`, still runs."""
    pid = process.get("pid")
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process.get("started") == start_of_process(pid)  # the system may reuse a pid


def start_of_process(pid: int) -> str | None:
    """Return a process's start in clock ticks since boot; None without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]  # a zombie no longer runs
