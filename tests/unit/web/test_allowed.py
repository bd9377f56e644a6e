"""What a request may set, and that nothing of it is read as Hydra's grammar."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")

from hetexp.app import compose_config
from hetexp.web import allowed


def refused(key: str, value: object) -> str:
    ((named, message),) = allowed.problems_of({key: value}, None)
    assert named == key
    return message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.max_steps", 0),
        ("trainer.max_steps", 1.0),
        ("trainer.max_steps", True),
        ("trainer.max_steps", "5"),
        ("trainer.global_batch_size", None),
        ("optimizer.lr", float("nan")),
        ("optimizer.lr", "${oc.env:HOME}"),
        ("model", "custom"),
        ("model", "../../x"),
        ("data", "choice(a,b)"),
        ("trainer.drop_last", "true"),
        ("balancing.weights", []),
        ("balancing.weights", [1, "a"]),
        ("balancing.weights", [1] * 65),
        ("name", "a'b"),
        ("name", "${x}"),
        ("name", "a=b"),
        ("name", ""),
    ],
)
def test_values_that_fit_no_key_are_refused(key: str, value: object) -> None:
    assert f"`{key}` must be " in refused(key, value)


@pytest.mark.parametrize(
    "key",
    [
        "model._target_",
        "resume",
        "hydra.run.dir",
        "+model.x",
        "~trainer",
        "launch.port",
        "monitor.url",
        "hardware.devices",
    ],
)
def test_other_keys_are_refused(key: str) -> None:
    assert "is not a key that a request may set" in refused(key, 1)


def test_messages_say_what_is_accepted() -> None:
    assert refused("trainer.max_steps", 0) == (
        "`trainer.max_steps` must be a whole number from 1 to 10000000, or null, but is 0 instead."
    )
    assert "Did you mean `float32`?" in refused("trainer.precision", "float33")
    ((_, message),) = allowed.problems_of({}, "scaling")  # a sweep
    shipped = "gpt_text, lora_8b, lora_small, none, sae_digits"
    assert message.startswith(f"`experiment` must be one of {shipped}, or null")


def fitting(one: allowed.Allowed) -> st.SearchStrategy[Any]:
    low, high = one.minimum, one.maximum
    if one.choices is not None:
        return st.sampled_from(one.choices)
    if one.kind == "bool":
        return st.booleans()
    if one.kind == "text":
        return st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 _.,:+()-]{0,40}", fullmatch=True)
    assert low is not None and high is not None
    whole = one.kind in ("int", "ints")
    numbers = st.integers(int(low), int(high)) if whole else st.floats(low, high)
    return st.lists(numbers, min_size=1, max_size=4) if one.kind in ("ints", "floats") else numbers


@settings(deadline=None, max_examples=10)
@given(st.data())
def test_values_come_back_as_they_were(data: st.DataObject) -> None:
    """Of all keys of the plain configuration: what Hydra reads of the words is what the request said."""
    keys = [one for one in allowed.allowed().values() if one.key == "name" or one.key.startswith("trainer.")]
    overrides = {one.key: data.draw(fitting(one)) for one in keys}
    assert allowed.problems_of(overrides, None) == []
    composed = compose_config(allowed.words(overrides, None, ["cpu", "emulated:t4"]))
    assert list(composed.hardware.devices) == ["cpu", "emulated:t4"]
    for key, value in overrides.items():
        section, _, name = key.rpartition(".")
        found = composed[section][name] if section else composed[name]
        assert (found, type(found)) == (value, type(value)), key


def test_each_group_can_be_chosen() -> None:
    for group in allowed.GROUPS:
        assert allowed.options()[group]
    words = allowed.words({"optimizer.lr": 1, "optimizer": "sgd", "model": "gpt"}, "gpt_text", ["cpu"])
    assert words[:3] == ["experiment=gpt_text", "model=gpt", "optimizer=sgd"]  # options before their keys
    assert compose_config(words).optimizer.lr == 1.0
