"""What every part of the typed configuration has in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from hetexp.core.errors import plain_line


class Section(BaseModel):
    """A part of the configuration: no unknown keys, no silent conversions, no infinities, read-only.

    The docstring below each field is the field's description. The first sentence is its comment in
    `conf/*.yaml`, and all of it stands in the guide's tables (`scripts/describe_keys.py` writes both).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key; lists are values."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def first_problem(error: ValidationError) -> str:
    """Return the first of pydantic's problems in one line: where it is, and what."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return plain_line(f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}")


def as_text(value: Any) -> Any:
    """Return a whole number as text: YAML and the command line read the name `6600` as a number."""
    return str(value) if type(value) is int else value


def without_problem(problem_of: Callable[[str], str]) -> AfterValidator:
    """Return a validator that refuses a text if `problem_of` says what the text must be instead."""

    def checked(value: str) -> str:
        if problem := problem_of(value):
            raise PydanticCustomError("text_refused", "{problem}", {"problem": problem})
        return value

    return AfterValidator(checked)


Name = Annotated[str, BeforeValidator(as_text)]
"""A text that may look like a number."""
