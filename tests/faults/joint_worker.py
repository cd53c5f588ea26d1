"""A process that takes part in a joint search without compiler and device; tests kill it.

    python joint_worker.py ROLE STORAGE FOLDER TRIALS SECONDS_PER_TRIAL

`test_joint_tunes.py` starts and kills it. It searches 30 configs by the real search loop.
`FOLDER/tried` gets a line when a trial begins.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from search_fakes import PROBLEM, FakeSession, config

from kgen.catalogue import profile_named
from kgen.model.config import Config
from kgen.search.feasible import Feasible
from kgen.search.storage import parse_storage
from kgen.tune.builds_ahead import BuildsAhead
from kgen.tune.joint import open_joint
from kgen.tune.request import Limits, SharedStorage, TuneRequest
from kgen.tune.search_loop import ProblemSearch
from kgen.tune.warm_start import WarmStart

CONFIGS = [config(name, i) for name in ("a", "b", "c") for i in range(10)]


class SlowSession(FakeSession):
    """A session whose trials take some time."""

    environment: dict[str, str] = {"device": "a device", "sms": "1"}  # noqa: RUF012

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, {"a": 10.0, "b": 12.0, "c": 14.0})
        self.tried = folder / "tried"
        self.seconds = seconds
        self.on_run = self._begin

    def _begin(self, config: Config) -> None:
        descriptor = os.open(self.tried, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{config.label}\n".encode())
        os.close(descriptor)
        time.sleep(self.seconds)


@contextmanager
def joint_search(
    role: str, storage: str, folder: Path, trials: int, seconds: float
) -> Iterator[ProblemSearch]:
    """A search of the 30 configs that shares its study."""
    session = SlowSession(folder, seconds)
    made = session.as_session()
    request = cast("TuneRequest", cast("Any", SimpleNamespace(
        # Dead processes of this machine are recognised by their pids. With a long grace time a slow
        # process does not seem dead.
        shared=SharedStorage(parse_storage(storage), grace_s=60.0, patience_s=60.0),
        gpu=profile_named("h200"), ordinal=0, study=folder / "study.log", seed=0, limits=Limits(),
        paths=(), journal=session.journal.path, compiler=SimpleNamespace(name="host"),
        passes=("forward",), problems={"forward": (PROBLEM,)}, retry_name="",
    )))
    with open_joint(request, is_tuner=role == "tuner") as joint:
        assert joint is not None
        joint.share_journal(made, request)
        yield ProblemSearch(
            made, request, PROBLEM, Feasible(tuple(CONFIGS), len(CONFIGS), ()),
            WarmStart(tuple(CONFIGS[:3])), BuildsAhead(made, 1), trials=trials, deadline=None,
            retry=False, joint=joint,
        )


def main(role: str, storage: str, folder: Path, trials: int, seconds: float) -> None:
    """Search until the trials are used up."""
    with joint_search(role, storage, folder, trials, seconds) as search:
        print("ready", flush=True)
        for _ in search.run():
            pass
    print(f"{role} done: {sum(search.state.fates.values())} records", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
