"""An Optuna storage that waits for its server, so that a search survives a database restart.

Calls of Optuna's methods may be repeated. A repeated `create_new_trial` may leave a running trial
that its process does not know; `Search.ask` voids it. A repeated `set_trial_state_values` finds the
trial already finished, which counts as success.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage

from kgen.errors import StorageError
from kgen.search.storage import StorageUrl, first_line

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0
_METHODS = tuple(
    name
    for name in dir(BaseStorage)
    if not name.startswith("_") and callable(getattr(BaseStorage, name))
)


def patient_storage(
    inner: BaseStorage,
    url: StorageUrl,
    patience_s: float,
    say: Callable[[str], None] | None = None,
) -> BaseStorage:
    """Wrap a storage: each of its methods waits for a server that does not answer.

    Args:
        inner: The storage.
        url: The storage's URL, for messages.
        patience_s: How long a method repeats its call.
        say: Receives a line when the wait begins and when it ends; None: standard error.
    """
    told = say or (lambda line: print(f"kgen: {line}", file=sys.stderr, flush=True))
    return _PatientStorage(_Patience(inner, url, patience_s, told))  # type: ignore[no-any-return]


class _Patience:
    """Repeats calls of a storage."""

    def __init__(
        self, inner: BaseStorage, url: StorageUrl, patience_s: float, say: Callable[[str], None]
    ) -> None:
        self._inner, self._url, self._patience_s, self._say = inner, url, patience_s, say

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the storage until its server answers.

        Raises:
            StorageError: If the server does not answer in time, or refuses a write.
        """
        method = getattr(self._inner, name)
        pause_s, waited_since = _FIRST_PAUSE_S, 0.0
        while True:
            try:
                answer = method(*arguments, **named)
            except UpdateFinishedTrialError:
                if waited_since and name == "set_trial_state_values":
                    answer = True  # the earlier call was carried out, but its answer was lost
                else:
                    raise
            except Exception as problem:
                why = self._why_no_answer(problem)
                if not why:
                    if isinstance(problem, StorageInternalError):
                        why = first_line(self._url.hide(str(problem.__cause__ or problem)))
                        raise StorageError(f"{self._url}: the storage refuses: {why}") from None
                    raise
                now = time.monotonic()
                if not waited_since:
                    waited_since = now
                    self._say(f"{self._url} does not answer ({why}); trying again for "
                              f"{self._patience_s:g} s")
                if now - waited_since > self._patience_s:
                    raise StorageError(
                        f"{self._url}: no answer for {self._patience_s:g} s: {why}\n"
                        "  next: start the server and repeat the command; finished trials are in "
                        "the journal of this host, and the command sends them"
                    ) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if waited_since:
                self._say(f"{self._url} answers again")
            return answer

    def _why_no_answer(self, problem: Exception) -> str:
        """Why the server does not answer; empty if the error has another cause."""
        cause = problem.__cause__ if isinstance(problem, StorageInternalError) else problem
        kind = type(cause)
        # PendingRollbackError: Optuna queries once more in the transaction that the server's end
        # broke (it suspects the number of variables), and then rolls it back.
        if kind.__module__.startswith("sqlalchemy") and kind.__name__ in (
            "OperationalError", "InterfaceError", "DisconnectionError", "TimeoutError",
            "PendingRollbackError",
        ):
            return first_line(self._url.hide(str(cause)))
        code = getattr(cause, "code", None)
        if kind.__module__.startswith("grpc") and callable(code):
            name = getattr(code(), "name", "")
            # The proxy answers UNKNOWN when its own database is gone.
            if name in ("UNAVAILABLE", "UNKNOWN", "INTERNAL", "DEADLINE_EXCEEDED"):
                details = getattr(cause, "details", lambda: "")()
                return f"{name.lower()}: {first_line(self._url.hide(str(details)))}"
        return ""


def _method(name: str) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.patience.call(name, *arguments, **named)

    call.__name__ = name
    return call


def _init(self: Any, patience: _Patience) -> None:
    self.patience = patience


# A class with every public method of the installed Optuna's `BaseStorage`.
_PatientStorage: Any = type(
    "_PatientStorage",
    (optuna.storages.BaseStorage,),
    {"__init__": _init, **{name: _method(name) for name in _METHODS}},
)
