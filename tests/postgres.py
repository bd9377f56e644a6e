"""A PostgreSQL for tests: the one that `HETEXP_TEST_POSTGRES` names, else Debian's, started for this session.

The server listens on a socket in a temporary folder and nowhere else, and ends with the tests, whatever they
end of.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

VARIABLE = "HETEXP_TEST_POSTGRES"
START_SECONDS = 60.0


def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, the newest version's."""
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    return versions[-1].parent if versions else None


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a database; skip the tests where there is none."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'hetexp[postgres]')")
    named = os.environ.get(VARIABLE)
    if named:
        yield named
        return
    folder = programs()
    if folder is None:
        pytest.skip(f"no PostgreSQL: {VARIABLE} names none, and initdb is not installed")
    as_user: list[str] = []
    place = Path(tempfile.mkdtemp(prefix="hetexp-pg-"))
    if os.getuid() == 0:  # the server refuses to be root's
        shutil.chown(place, "postgres", "postgres")
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    data, log = place / "data", place / "log"
    try:
        make = [*as_user, str(folder / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-N"]
        subprocess.run(make, check=True, capture_output=True, cwd=place)
        ends_with_us = ["setpriv", *as_user[1:], "--pdeathsig", "INT"]
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "autovacuum=off", "-k", str(place)]
        with log.open("wb") as output:
            running = subprocess.Popen(
                [*ends_with_us, str(folder / "postgres"), "-D", str(data), *options],
                stdout=output,
                stderr=output,
                cwd=place,
            )
        try:
            _wait(folder, place, running, log)
            yield f"postgresql://postgres@/postgres?host={quote(str(place), safe='')}"
        finally:
            running.send_signal(signal.SIGINT)  # does not wait for clients, as SIGTERM does
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _wait(folder: Path, place: Path, running: subprocess.Popen[bytes], log: Path) -> None:
    deadline, pause = time.monotonic() + START_SECONDS, threading.Event()
    ready = [str(folder / "pg_isready"), "-q", "-h", str(place), "-U", "postgres"]
    while subprocess.run(ready, check=False).returncode != 0:
        assert running.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        pause.wait(0.05)


@contextmanager
def schema(url: str, name: str) -> Iterator[str]:
    """Yield the URL of an empty part of a database, which is dropped afterwards."""
    from sqlalchemy import create_engine, text

    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:", 1), isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(f"DROP SCHEMA IF EXISTS {name} CASCADE"))
            connection.execute(text(f"CREATE SCHEMA {name}"))
        yield f"{url}{'&' if '?' in url else '?'}options={quote(f'-csearch_path={name}', safe='')}"
        with engine.connect() as connection:
            connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
    finally:
        engine.dispose()
