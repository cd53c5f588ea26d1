"""Open the storage of a study: an Optuna journal file, a database, or Optuna's gRPC proxy."""

from __future__ import annotations

import importlib
import os
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from kgen.errors import KgenError, OptionError, RecordError, StorageError
from kgen.search.lock import FileLock
from kgen.search.study_file import StudyFile

if TYPE_CHECKING:
    import optuna

PATIENCE_S = 120.0  # a database that restarts answers again within this time
_CONNECT_TIMEOUT_S = 10
_OPENINGS = 5  # attempts: processes that create a new database's tables concurrently collide
_EXAMPLES = "postgresql://user@host/database, mysql://..., sqlite:///file.db, grpc://host:13000"
# The SQLAlchemy driver of each scheme, if the URL names none.
_SCHEMES = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "sqlite": "sqlite",
    "grpc": "grpc",
    "journal": "journal",
}


@dataclass(frozen=True, slots=True)
class StorageUrl:
    """The storage that the processes of a tune share.

    Attributes:
        text: The whole URL, with its password. Never print it; `str` and `shown` leave it out.
        shown: The URL without password and without query.
        has_password: Whether the URL holds a password.
    """

    text: str = field(repr=False)
    shown: str
    has_password: bool = False

    def __str__(self) -> str:
        return self.shown

    @property
    def scheme(self) -> str:
        """The scheme without the driver: `postgresql`, `mysql`, `sqlite`, `grpc`, `journal`."""
        return self.text.partition("://")[0].partition("+")[0]

    def hide(self, text: str) -> str:
        """Remove the password from a driver's or a server's text."""
        parts = urlsplit(self.text)
        secrets = {parts.password or "", *_passwords_of(parts.query)}
        for secret in sorted((s for s in secrets if s), key=len, reverse=True):
            for spelling in (secret, unquote(secret)):
                text = text.replace(spelling, "***")
        return text


def parse_storage(text: str) -> StorageUrl:
    """Read a storage URL.

    Args:
        text: `postgresql://`, `mysql://`, `sqlite:///`, `grpc://`, or `journal:///` for an Optuna
            journal file, which processes of one host can share.
    Raises:
        OptionError: If it is malformed. The text of the error has no password.
    """
    scheme, separator, _ = text.partition("://")
    kind = scheme.partition("+")[0].lower()
    if not separator or kind not in _SCHEMES:
        why = f"unknown scheme '{scheme}'" if separator else "a URL needs a scheme"
        raise OptionError(f"--storage: {why}\n  examples: {_EXAMPLES}")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:  # not chained: the error's text may quote the password
        raise OptionError(
            f"--storage: the {kind} URL is malformed\n  examples: {_EXAMPLES}\n"
            "  write special characters of a password as %XX"
        ) from None
    if kind in ("sqlite", "journal"):
        if not parts.path.strip("/"):
            raise OptionError(f"--storage: the {kind} URL names no file\n  next: {kind}:///FILE")
    elif not host:
        raise OptionError(f"--storage: the {kind} URL names no host\n  examples: {_EXAMPLES}")
    if kind == "grpc" and (port is None or parts.path.strip("/")):
        raise OptionError("--storage: want grpc://HOST:PORT, the address of "
                          "optuna.storages.run_grpc_proxy_server")
    user = f"{parts.username}@" if parts.username else ""
    place = f"{user}{host or ''}" + (f":{port}" if port is not None else "")
    shown = f"{kind}://{place}{parts.path}"
    has_password = bool(parts.password) or bool(_passwords_of(parts.query))
    driver = scheme if "+" in scheme else _SCHEMES[kind]
    return StorageUrl(driver + text[len(scheme):], shown, has_password)


def storage_option(value: str | None) -> StorageUrl | None:
    """Resolve `--storage`, or KGEN_STORAGE if the option is absent; None if neither is given.

    Raises:
        OptionError: If it is malformed, or if the command line holds a password: every user of the
            machine can read the command lines of its processes.
    """
    if value:
        storage = parse_storage(value)
        if storage.has_password:
            raise OptionError(
                f"--storage {storage.shown}: the URL holds a password, and command lines are "
                "visible to all users of a machine\n  next: leave the password out and set "
                "PGPASSWORD or ~/.pgpass; or set KGEN_STORAGE to the whole URL, without --storage"
            )
        return storage
    found = os.environ.get("KGEN_STORAGE", "")
    return parse_storage(found) if found else None


def open_storage(
    url: StorageUrl, patience_s: float = PATIENCE_S, say: Callable[[str], None] | None = None
) -> optuna.storages.BaseStorage:
    """Open the storage; its tables are made if they are missing.

    A later call that finds the server gone is repeated until `patience_s` have passed.

    Args:
        url: The storage.
        patience_s: How long a call waits for a server that does not answer.
        say: Receives a line when the wait begins and when it ends; None: standard error.
    Raises:
        StorageError: If it cannot be opened now.
    """
    import optuna

    from kgen.search.patient import patient_storage

    if optuna.logging.get_verbosity() == optuna.logging.INFO:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # Optuna logs a line per study
    if url.scheme == "journal":
        return open_journal_file(Path(unquote(urlsplit(url.text).path)))
    try:
        inner = _open_proxy(url) if url.scheme == "grpc" else _open_database(url)
    except ImportError as problem:
        raise StorageError(
            f"{url}: a package is missing: {url.hide(str(problem.__cause__ or problem))}\n"
            f"  next: pip install {_package(url)}"
        ) from None
    return patient_storage(inner, url, patience_s, say)


def open_journal_file(path: Path) -> optuna.storages.BaseStorage:
    """Open an Optuna journal file; it is made, with its folder, if it is missing.

    Raises:
        StorageError: If the file cannot be written.
        RecordError: If the file is damaged.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_partial_line(path)
    backend = JournalFileBackend(str(path), lock_obj=cast(Any, FileLock(str(path))))
    try:
        return JournalStorage(cast(Any, StudyFile(str(path), backend)))
    except (KgenError, OSError):
        raise
    except Exception as problem:  # Optuna does not expect a damaged file, and may raise anything
        raise RecordError(
            f"{path}: the study is damaged ({type(problem).__name__}: {problem})\n"
            "  next: delete the file; the next tune writes it anew from the journal beside it"
        ) from None


def _open_database(url: StorageUrl) -> optuna.storages.BaseStorage:
    import optuna
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError

    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.scheme in ("postgresql", "mysql"):
        # One connection for the search and one for the heartbeat: servers admit few connections.
        options |= {"pool_size": 1, "max_overflow": 8,
                    "connect_args": {"connect_timeout": _CONNECT_TIMEOUT_S}}
    failure: Exception
    for attempt in range(1, _OPENINGS + 1):
        try:
            # Optuna formats the URL as a template, so braces are doubled.
            text = url.text.replace("{", "{{").replace("}", "}}")
            return optuna.storages.get_storage(
                optuna.storages.RDBStorage(text, engine_kwargs=options)
            )
        except (IntegrityError, ProgrammingError) as problem:  # another process creates the tables
            failure = problem
        except OperationalError as problem:
            failure = problem
            if url.scheme != "sqlite" or "locked" not in str(problem):
                break
        except (SQLAlchemyError, RuntimeError, ValueError) as problem:
            failure = problem
            break
        time.sleep(0.2 * attempt)
    advice = ("name a file that you may write, in a folder that exists" if url.scheme == "sqlite"
              else "check host, port, user and database; the password comes from PGPASSWORD, "
              "~/.pgpass or KGEN_STORAGE")
    raise StorageError(
        f"{url}: cannot be opened: {first_line(url.hide(str(failure)))}\n  next: {advice}"
    ) from None


def _open_proxy(url: StorageUrl) -> optuna.storages.BaseStorage:
    import optuna

    for package in ("grpc", "google.protobuf"):  # Optuna imports these lazily
        importlib.import_module(package)
    parts = urlsplit(url.text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        proxy = optuna.storages.GrpcStorageProxy(
            host=parts.hostname or "localhost", port=parts.port or 13000
        )
    try:
        proxy.wait_server_ready(timeout=_CONNECT_TIMEOUT_S)
    except ConnectionError:
        proxy.close()
        raise StorageError(
            f"{url}: no answer within {_CONNECT_TIMEOUT_S} s\n"
            "  next: start optuna.storages.run_grpc_proxy_server there, or check host and port"
        ) from None
    return proxy


def first_line(text: str) -> str:
    """Return the first line of a message, without the driver's class in parentheses."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return re.sub(r"^\([\w.]+\)\s*", "", line)


def _passwords_of(query: str) -> list[str]:
    return [value for name, value in parse_qsl(query) if "passw" in name.lower()]


def _package(url: StorageUrl) -> str:
    return {"grpc": "grpcio protobuf", "mysql": "pymysql", "mariadb": "pymysql"}.get(
        url.scheme, "'kgen[postgres]'")


def _remove_partial_line(path: Path) -> None:
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
