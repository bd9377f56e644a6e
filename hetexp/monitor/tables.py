"""The monitor's tables, and the functions that open SQLite and PostgreSQL for several writing processes."""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    Table,
    Text,
    create_engine,
    event,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable

from hetexp.core.errors import SetupError
from hetexp.hardware.detection.builds import home
from hetexp.hardware.detection.detected import Sensors
from hetexp.monitor.sample import Device

SCHEMA = 1
"""Version of the tables; a database of a newer one is refused."""
BUSY_SECONDS = 30.0
"""Longest wait for another writer."""
UNREACHABLE = "The monitor's database cannot be reached"
"""Beginning of the message."""
WRITES = "hetexp_writes"
"""Execution option of connections that write: SQLite's lock is then taken at once, not after a read."""
_LOCK = 0x68657465
"""Number of PostgreSQL's advisory lock under which tables are made."""

metadata = MetaData()

about = Table("monitor_schema", metadata, Column("version", Integer, primary_key=True))

_KINDS = {"str": Text, "int": Integer, "bool": Boolean}


def _column(field: Field[Any]) -> Column[Any]:
    """Return the column of a field of `Device`."""
    kind, _, optional = str(field.type).partition(" | ")
    return Column(field.name, _KINDS[kind](), nullable=bool(optional), unique=field.name == "key" or None)


devices = Table("devices", metadata, Column("id", Integer, primary_key=True), *map(_column, fields(Device)))

RAW, TEN_SECONDS, MINUTE = 0, 1, 2
"""Levels of samples: as taken, and means."""
_SENSORS = tuple(field.name for field in fields(Sensors) if field.name != "throttled")
VALUES = (*_SENSORS, "memory_used_bytes", "memory_total_bytes")
"""Columns of a sample that have a mean."""

device_metrics = Table(
    "device_metrics",
    metadata,
    Column("device_id", Integer, ForeignKey("devices.id", ondelete="CASCADE"), primary_key=True),
    Column("time_ms", BigInteger, primary_key=True, autoincrement=False),
    Column("level", SmallInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    *(Column(name, BigInteger if name.endswith("_bytes") else Float) for name in VALUES),
    Column("throttled", JSON(none_as_null=True)),
    Column("users", JSON, nullable=False),
    Index("device_metrics_by_level", "level", "time_ms"),
    sqlite_with_rowid=False,
)

trainings = Table(
    "trainings",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False, index=True),
    Column("gpu_ids", JSON, nullable=False),
    Column("distributed", Boolean, nullable=False),
    Column("emulated", Boolean, nullable=False),
    Column("strategy", Text, nullable=False),
    Column("progress", Float),
    Column("step", Integer),
    Column("steps", Integer),
    Column("loss", Float),
    Column("samples_per_second", Float),
    Column("error", Text),
    Column("run_dir", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", Integer),
    Column("process_mark", Text),
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("ended", Float),
)


def default_path() -> Path:
    """Return the file of the database if no URL names another."""
    return home() / "monitor.sqlite"


def open_engine(url: str | None) -> Engine:
    """Open the database and make missing tables.

    Args:
        url: `monitor.url`.

    Raises:
        SetupError: the driver is not installed, the database cannot be reached or written, or the tables are
            a newer hetexp's.
    """
    engine = _sqlite(url) if url is None or url.startswith("sqlite") else _postgresql(url)
    try:
        with engine.execution_options(**{WRITES: True}).begin() as connection:
            if connection.dialect.name == "postgresql":
                # IF NOT EXISTS may fail if two processes create a table at the same time.
                connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK})
            _make_tables(connection)
    except BaseException as error:
        engine.dispose()
        if isinstance(error, SQLAlchemyError):
            raise SetupError(f"{unreachable(error)}. Name another one with monitor.url=….") from error
        raise
    return engine


def unreachable(error: SQLAlchemyError) -> str:
    """Return the message that the database does not answer."""
    return f"{UNREACHABLE}: {str(error).splitlines()[0].rstrip('.')}"


def insert_into(connection: Connection, table: Table) -> Any:
    """Return the database's own INSERT, which supports `ON CONFLICT`."""
    dialect: Any = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


def _sqlite(url: str | None) -> Engine:
    if url is None:
        default_path().parent.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{default_path()}"
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun below
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        # The system has all committed data: a killed process loses nothing, and the file stays whole if the
        # machine stops.
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql(url: str) -> Engine:
    if url.startswith("postgresql:"):
        url = url.replace("postgresql:", "postgresql+psycopg:", 1)
    try:
        return create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 5})
    except ImportError:
        raise SetupError(
            "`monitor.url` names a PostgreSQL database, but psycopg, which reaches it, cannot be imported; "
            "run: pip install 'hetexp[postgres]'"
        ) from None


def _make_tables(connection: Connection) -> None:
    for table in metadata.sorted_tables:
        connection.execute(CreateTable(table, if_not_exists=True))
        for index in table.indexes:
            connection.execute(CreateIndex(index, if_not_exists=True))
    version = connection.scalar(select(about.c.version))
    if version is None:
        connection.execute(about.insert().values(version=SCHEMA))
    elif version > SCHEMA:
        raise SetupError(
            f"The monitor's database has tables of version {version}, and this hetexp knows {SCHEMA}; "
            "update hetexp, or name another database (monitor.url)."
        )
