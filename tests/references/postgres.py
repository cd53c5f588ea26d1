"""A PostgreSQL server for tests, with its own folder and port, started and ended by the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

USER, PASSWORD = "kgen", "s3cret-of-the-test"


class Postgres:
    """A server whose data is in a folder.

    Attributes:
        port: Port on 127.0.0.1.
        folder: Holds the data and the server's log.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self.folder = programs, folder
        self.port = _free_port()
        self._server: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root; Debian's package makes this user.
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
            self._as_user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        password = folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        self._run("initdb", "-D", str(folder / "data"), "-U", USER, "--auth=scram-sha-256",
                  f"--pwfile={password}", "--no-sync", "--encoding=UTF8")

    def url(self, database: str = "postgres") -> str:
        """The URL of a database, without the password."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        deadline = time.monotonic() + 30
        while True:
            if self._server is None or self._server.poll() is not None:
                self._server = self._popen(
                    "postgres", "-D", str(self.folder / "data"), "-p", str(self.port),
                    "-k", str(self.folder), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off",
                )
            with contextlib.suppress(OSError), \
                    socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill all processes of the server at once, as a power failure would."""
        assert self._server is not None
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._server = None

    def query(self, sql: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a statement, and return its rows."""
        import psycopg

        deadline = time.monotonic() + 30
        while True:
            try:
                with psycopg.connect(
                    host="127.0.0.1", port=self.port, user=USER, password=PASSWORD,
                    dbname=database, autocommit=True,
                ) as connection:
                    cursor = connection.execute(sql.encode())
                    return cursor.fetchall() if cursor.description else []
            except psycopg.OperationalError:  # the server accepts connections before it serves them
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def new_database(self, name: str) -> str:
        """Create a database; return its URL without the password."""
        self.query(f"CREATE DATABASE {name}")
        return self.url(name)

    def _popen(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [str(self._programs / program), *arguments], cwd="/", stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True, **self._as_user,
            )

    def _run(self, program: str, *arguments: str) -> None:
        done = self._popen(program, *arguments)
        assert done.wait(60) == 0, (self.folder / "log").read_text()


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """A running server; the test is skipped if PostgreSQL or its driver is missing."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'kgen[postgres]'")
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    # Not in pytest's folder, which the server's user cannot read.
    with tempfile.TemporaryDirectory(prefix="kgen-postgres-") as folder:
        server = Postgres(programs, Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()


def _programs() -> Path | None:
    found = shutil.which("initdb")
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"),
                      key=lambda path: int(path.parent.parent.name))
    if versions:
        return versions[-1].parent
    return Path(found).resolve().parent if found else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
