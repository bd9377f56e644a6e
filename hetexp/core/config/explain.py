"""Problems of the schema in the project's own sentences."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hetexp.core.errors import did_you_mean, how_to_write, must_be

M = TypeVar("M", bound=BaseModel)
_WORDS = {
    "array": "list",
    "object": "mapping",
    "an object": "a mapping",
    "boolean": "boolean (true or false)",
}
"""JSON's words and ours."""


def validated(model: type[M], raw: Any, prefix: str = "") -> tuple[M | None, list[str]]:
    """Return a section of that model, or `None` and all problems.

    Args:
        raw: plain types.
        prefix: key of the section.
    """
    try:
        # Strict JSON mode: a list may become a tuple, but neither "8" nor true becomes a number.
        return model.model_validate_json(json.dumps(raw), strict=True), []
    except ValidationError as error:
        return None, explain(error, raw, prefix, model)


def explain(
    error: ValidationError, raw: Any, prefix: str = "", schema: type[BaseModel] | None = None
) -> list[str]:
    """Return a pydantic error as sentences of the project's own grammar, one for each problem.

    Args:
        raw: the value that was checked.
        prefix: key of that value.
        schema: the model of that value, to suggest keys from; `None` suggests nothing.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for item in error.errors(include_url=False):
        key = _dotted(prefix, _without_branches(item["loc"], raw, item["type"]))
        kind, value = item["type"], item["input"]
        if key in seen:  # a union reports each of its branches; one sentence is enough
            continue
        seen.add(key)
        if kind == "extra_forbidden":
            owner = key.rpartition(".")[0]
            section = f"`{owner}`" if owner else "the configuration"
            hint = did_you_mean(str(item["loc"][-1]), _known_keys(schema, item["loc"]))
            problems.append(f"`{key}` is not a key of {section} (its value is {value!r}).{hint}")
        elif kind == "missing":
            problems.append(f"`{key}` must be given, but is missing.")
        elif kind == "too_short":
            problems.append(must_be(key, "a list with at least one entry", value))
        else:
            accepted = item["msg"].removeprefix("Input should be ")
            if accepted.startswith("a valid "):
                accepted = accepted.removeprefix("a valid ")
                accepted = _WORDS.get(accepted, accepted)
                accepted = f"{'an' if accepted[0] in 'aeiou' else 'a'} {accepted}"
            accepted = _WORDS.get(accepted, accepted)
            problems.append(must_be(key, accepted, value, how_to_write(kind, value)))
    return problems


def _without_branches(location: tuple[int | str, ...], raw: Any, kind: str) -> tuple[int | str, ...]:
    """Leave out the names of union branches, which pydantic puts between the keys."""
    kept: list[int | str] = []
    value = raw
    for position, part in enumerate(location):
        absent = kind == "missing" and position == len(location) - 1
        if isinstance(value, dict) and (part in value or absent):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif isinstance(part, int):  # below a short form (`cpu` for `[{device: cpu}]`)
            value = raw if isinstance(value, str) else None
        else:
            continue
        kept.append(part)
    return tuple(kept)


def _dotted(prefix: str, location: tuple[int | str, ...]) -> str:
    """Join a pydantic location to a Hydra key: `hardware.devices[0].count`."""
    key = prefix
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        elif part:
            key += f".{part}" if key else str(part)
    return key


def _known_keys(schema: type[BaseModel] | None, location: tuple[int | str, ...]) -> list[str]:
    """Keys that the section at `location` accepts, its last part being the unknown one."""
    model: Any = schema
    for part in location[:-1]:
        if isinstance(part, int) or model is None:
            continue
        annotation = model.model_fields[part].annotation
        inner = [a for a in getattr(annotation, "__args__", ()) if hasattr(a, "model_fields")]
        model = inner[0] if inner else annotation
    return list(model.model_fields) if model is not None else []
