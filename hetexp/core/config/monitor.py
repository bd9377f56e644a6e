"""Samples of what the devices do (config group `monitor`)."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, PositiveFloat

from hetexp.core.section import Section, without_problem


def _url_problem(url: str) -> str:
    """Return what a database's URL must be instead; empty if it can be used."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite" and parts.netloc == "" and len(parts.path) > 1:
        return ""
    if parts.scheme not in ("postgresql", "postgresql+psycopg") or len(parts.path) < 2:
        return "sqlite:///FILE (four slashes before an absolute path) or postgresql://USER@HOST/DATABASE"
    # As SQLAlchemy reads it: a password may have slashes, and the query escapes.
    user, found, _ = url.partition("://")[2].partition("@")
    keys = [key.lower() for key, _ in parse_qsl(parts.query, keep_blank_values=True)]
    if (found and ":" in user) or any("password" in key for key in keys):
        return "without a password, as every run keeps its configuration (~/.pgpass and PGPASSWORD give it)"
    return ""


class RetentionConfig(Section):
    """How long samples are kept; older samples are coarser."""

    raw_hours: PositiveFloat = 1.0
    """Hours until samples become means of 10 seconds."""
    ten_seconds_days: PositiveFloat = 1.0
    """Days until means of 10 seconds become means of a minute."""
    minutes_days: PositiveFloat = 30.0
    """Days until means of a minute are deleted."""


class MonitorConfig(Section):
    """Samples of what the devices do, in a small database that `hetexp top` shows."""

    enabled: bool = True
    """Whether to sample the devices, if the extra `monitor` is installed."""
    interval_seconds: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    """Seconds between samples."""
    view: Literal["aggregated", "per_gpu"] = "aggregated"
    """First view of `hetexp top`: `aggregated` or `per_gpu`."""
    url: Annotated[str, without_problem(_url_problem)] | None = None
    """URL of the database; `null`: `$HETEXP_HOME/monitor.sqlite`. `sqlite:////var/tmp/m.sqlite` and
    `postgresql://me@host/database` are examples. It has no password, since every run keeps its
    configuration."""
    retention: RetentionConfig = RetentionConfig()
