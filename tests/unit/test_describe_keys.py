"""Each configuration key is described once, and every other text about it agrees."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml
from describe_keys import (
    CONF,
    DOCS,
    FORM,
    SECTION_FILES,
    choices,
    conf_files,
    option_keys,
    options,
    outputs,
    read_lines,
    schema,
)
from support import unbuilt_config

from hetexp.core.config import COMPONENTS, check_config

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")

from hetexp.web.allowed import allowed


def test_files_say_what_the_schema_says() -> None:
    for path, text in outputs().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python scripts/describe_keys.py"


def test_every_key_has_a_description() -> None:
    assert [name for name, key in schema().items() if not key.text] == []
    for group in COMPONENTS:
        for option in options(group):
            assert all(key.text for key in option_keys(group, option).values()), f"{group}={option}"


def test_every_key_has_a_comment_in_conf() -> None:
    _, described = conf_files()
    sections = {name for name in schema() if any(other.startswith(f"{name}.") for other in schema())}
    in_groups = {name for name in schema() if name.startswith(("hardware.devices[]", "fault.events[]"))}
    assert set(schema()) - described <= sections | in_groups | set(COMPONENTS)


@pytest.mark.parametrize("name", ["config", *SECTION_FILES])
def test_conf_has_no_key_that_the_schema_lacks(name: str) -> None:
    prefix = name.partition("/")[0] if "/" in name else ""
    lines = read_lines((CONF / f"{name}.yaml").read_text(encoding="utf-8"), prefix)
    paths = [line.path for line in lines if line.path and not line.path.startswith(("hydra", "defaults"))]
    assert [path for path in paths if path not in schema()] == []


def test_the_page_of_every_key_has_them_all() -> None:
    text = (DOCS / "reference/keys.md").read_text(encoding="utf-8")
    marked = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    for name in schema():
        if name not in COMPONENTS and not any(other.startswith(f"{name}.") for other in schema()):
            assert name.rpartition("[].")[2] in marked, name
    for group in COMPONENTS:
        for option in options(group):
            assert {f"{group}.{name}" for name in option_keys(group, option)} <= marked, f"{group}={option}"


@pytest.mark.parametrize(
    ("page", "head", "key"),
    [
        ("how-to/precision.md", "| value | what it means |", "trainer.precision"),
        ("how-to/precision.md", "| value | what happens |", "trainer.non_finite"),
        ("how-to/mixed-cards.md", "| value | what happens |", "hardware.missing"),
        ("explanation/emulation.md", "| `kind` |", "fault.events[].kind"),
        ("explanation/exchange.md", "| `comm=` |", "comm.backend"),
        ("explanation/exchange.md", "| `comm.wire=` |", "comm.wire"),
        ("how-to/pipeline.md", "| schedule |", "strategy=pipeline schedule"),
        ("how-to/sae.md", "| `model.activation` |", "model=sae activation"),
    ],
)
def test_tables_of_choices_are_complete(page: str, head: str, key: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    rows = text.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    listed = [name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]
    option, _, argument = key.partition(" ")
    described = option_keys(*option.split("="))[argument] if argument else schema()[key]
    assert sorted(listed) == sorted(choices(described.annotation))


def test_the_page_of_every_key_names_every_precision() -> None:
    text = (DOCS / "reference/keys.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `trainer\.precision` \|.*", text, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == set(choices(schema()["trainer.precision"].annotation))


def test_every_option_of_a_group_is_in_its_table() -> None:
    for page, group in (("balancing", "balancing"), ("strategies", "strategy"), ("tracking", "logger")):
        text = (DOCS / f"how-to/{page}.md").read_text(encoding="utf-8")
        table = text.partition(f"| `{group}=` |")[2].partition("\n\n")[0]
        assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(options(group))


def _problems(key: str, value: Any) -> list[str]:
    raw = copy.deepcopy(unbuilt_config(trainer={"max_epochs": 1}))
    section, _, name = key.rpartition(".")
    (raw.setdefault(section, {}) if section else raw)[name] = value
    _, problems = check_config(raw)
    return [problem for problem in problems if problem.startswith(f"`{key}`")]


@pytest.mark.parametrize("key", [key for key in FORM if key in schema()])
def test_the_dashboard_allows_what_the_schema_allows(key: str) -> None:
    one = allowed()[key]
    if one.choices:
        assert [value for value in one.choices if _problems(key, value)] == []
        assert _problems(key, "another")
    elif one.minimum is not None and one.maximum is not None:
        number = int if one.kind == "int" else float
        assert not _problems(key, number(one.minimum))
        assert _problems(key, number(one.minimum) - 1)
        assert not _problems(key, number(one.maximum)) or key == "trainer.warmup_steps"
    assert bool(_problems(key, None)) is not one.nullable or key == "trainer.global_batch_size"


def test_the_dashboards_usual_options_are_those_of_conf() -> None:
    from hetexp.web.allowed import GROUPS, defaults

    listed = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = {name: option for entry in listed if isinstance(entry, dict) for name, option in entry.items()}
    assert {group: chosen[group] for group in GROUPS if group in defaults()}.items() <= defaults().items()
