"""What every part of the typed configuration has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: no unknown keys, no silent conversions, no infinities, read-only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
