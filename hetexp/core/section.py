"""What every part of the typed configuration has in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """A part of the configuration: no unknown keys, no silent conversions, no infinities, read-only.

    The docstring below each field is the field's description. The first sentence is its comment in
    `conf/*.yaml`, and all of it stands in the guide's tables (`scripts/describe_keys.py` writes both).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def as_text(value: Any) -> Any:
    """Return a whole number as text: YAML and the command line read the name `6600` as a number."""
    return str(value) if type(value) is int else value


Name = Annotated[str, BeforeValidator(as_text)]
"""A text that may look like a number."""
