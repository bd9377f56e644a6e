"""The schema: strict, tells every problem by its key, and has the same keys as the YAML files."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from support import checked, unbuilt_config

from hetexp.app import conf_dir
from hetexp.core.cluster import ClusterConfig
from hetexp.core.config import (
    COMPONENTS,
    CommConfig,
    Config,
    DebugConfig,
    EarlyStoppingConfig,
    HardwareConfig,
    LaunchConfig,
    MonitorConfig,
    RetentionConfig,
    SweepConfig,
    TrainerConfig,
    check_config,
    for_devices,
    own_arguments,
    read_config,
)
from hetexp.core.config.trainer import how_it_ends
from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import check_component, locate
from hetexp.core.section import Section

CONF = conf_dir()
SECTIONS: dict[str, type[Section]] = {
    "": Config,
    "hardware": HardwareConfig,
    "trainer": TrainerConfig,
    "trainer.early_stopping": EarlyStoppingConfig,
    "comm": CommConfig,
    "launch": LaunchConfig,
    "sweep": SweepConfig,
    "debug": DebugConfig,
    "monitor": MonitorConfig,
    "cluster": ClusterConfig,
    "monitor.retention": RetentionConfig,
}
OPTIONS = [
    f"{group}={file.stem}"
    for group in ("hardware", "trainer", "comm", "debug", "monitor", "experiment", "cluster")
    for file in sorted((CONF / group).glob("*.yaml"))
]
COMPONENT_FILES = [
    file
    for group in COMPONENTS
    for file in sorted((CONF / group).glob("*.yaml"))
    if "_target_: ???" not in file.read_text()  # a form for a person's own class
]


def own_files(option: str, folder: Path) -> list[str]:
    """Return what an option needs that works on a person's own files."""
    if option != "data=activations":
        return []
    np.save(folder / "vectors.npy", np.ones((4, 2), dtype=np.float32))
    return [f"data.folder={folder}"]


def composed(*overrides: str) -> dict[str, Any]:
    """Return the real configuration with some overrides, as plain types."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", list(overrides))
    raw: dict[str, Any] = json.loads(json.dumps(OmegaConf.to_container(cfg, resolve=True)))
    return raw


@pytest.fixture(scope="module")
def default() -> dict[str, Any]:
    return composed()


@pytest.fixture
def problems(default: dict[str, Any]) -> Callable[..., list[str]]:
    """Return what is wrong with the default configuration once some of its keys have other values."""

    def check(**changes: Any) -> list[str]:
        raw = copy.deepcopy(default)
        for key, value in changes.items():
            *path, last = key.split("__")
            node = raw
            for part in path:
                node = node[part]
            node[last] = value
        return check_config(raw)[1]

    return check


def test_the_shipped_configuration_is_right(default: dict[str, Any]) -> None:
    config = read_config(default)
    assert config.trainer.global_batch_size == default["trainer"]["global_batch_size"]
    assert config.hardware.devices[0].device == "auto"


# ---------------------------------------------------------------- conf and schema


@pytest.mark.parametrize("key", SECTIONS)
def test_yaml_and_schema_have_the_same_keys(key: str, default: dict[str, Any]) -> None:
    node = default
    for part in filter(None, key.split(".")):
        node = node[part]
    written_elsewhere = {"fallback"} if key == "" else set()  # strategy.fallback
    assert set(node) == set(SECTIONS[key].model_fields) - written_elsewhere


@pytest.mark.parametrize(
    "key",
    [
        *("comm", "launch", "sweep", "debug", "trainer", "trainer.early_stopping", "hardware"),
        *("monitor", "monitor.retention", "cluster"),
    ],
)
def test_yaml_and_schema_have_the_same_defaults(key: str, default: dict[str, Any]) -> None:
    node = default
    for part in key.split("."):
        node = node[part]
    decided_by_conf = {"global_batch_size", "max_epochs", "devices", "early_stopping", "retention"}
    for name, field in SECTIONS[key].model_fields.items():
        if name not in decided_by_conf:
            assert node[name] == field.get_default(), name


def skip_without_extra(raw: dict[str, Any]) -> None:
    if raw["model"]["_target_"].endswith("HFCausalLM"):
        pytest.importorskip("peft")
    if raw["optimizer"]["_target_"].endswith("MuonWithAdamW") and not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_validates(option: str, tmp_path: Path) -> None:
    # Its splits are what it varies.
    swept = ["balancing.weights=[1,1]"] if option == "experiment=weights_curve" else []
    raw = composed(option, *swept, *own_files(option, tmp_path))
    read_config(raw)
    skip_without_extra(raw)
    assert [problem for key in COMPONENTS for problem in check_component(key, raw[key])] == []


@pytest.mark.parametrize("file", COMPONENT_FILES, ids=lambda f: f"{f.parent.name}={f.stem}")
def test_every_component_file_fits_its_class(file: Path, tmp_path: Path) -> None:
    group = file.parent.name
    weights = ["balancing.weights=[2,1]"] if file.stem == "manual" else []
    raw = composed(f"{group}={file.stem}", *weights, *own_files(f"{group}={file.stem}", tmp_path))
    if group in ("model", "optimizer"):
        skip_without_extra(raw)
    assert check_component(group, raw[group]) == []
    read_config(raw)
    target = raw[group]["_target_"]
    if target.startswith("hetexp."):
        # Everything that a class of ours can do is written down in its file, where --cfg job shows it.
        written = set(own_arguments(group, raw[group])) - {"_target_", "_partial_"}
        assert written == set(inspect.signature(locate(target)).parameters) - {"params"}


def test_the_debug_option_changes_the_trainer() -> None:
    config = read_config(composed("debug=fast"))
    assert config.trainer.fast_dev_run == 2
    assert config.debug.detect_anomaly is True
    assert config.debug.normalizer == "global"


# ---------------------------------------------------------------- strictness


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "trainer__global_batch_size",
            "8",
            "`trainer.global_batch_size` must be an integer, but is '8' instead.",
        ),
        (
            "trainer__global_batch_size",
            True,
            "`trainer.global_batch_size` must be an integer, but is True instead.",
        ),
        (
            "trainer__global_batch_size",
            8.5,
            "`trainer.global_batch_size` must be an integer, but is 8.5 instead.",
        ),
        (
            "trainer__global_batch_size",
            0,
            "`trainer.global_batch_size` must be greater than 0, but is 0 instead.",
        ),
        (
            "trainer__global_batch_size",
            None,
            "`trainer.global_batch_size` must be an integer, but is null instead.",
        ),
        (
            "trainer__drop_last",
            "yes",
            "`trainer.drop_last` must be a boolean (true or false), but is 'yes' instead.",
        ),
        ("trainer__drop_last", 1, "`trainer.drop_last` must be a boolean (true or false), but is 1 instead."),
        (
            "trainer__clip_norm",
            float("inf"),
            "`trainer.clip_norm` must be a finite number, but is inf instead.",
        ),
        (
            "trainer__clip_norm",
            float("nan"),
            "`trainer.clip_norm` must be a finite number, but is nan instead.",
        ),
        (
            "trainer__precision",
            "bf17",
            "`trainer.precision` must be 'auto', 'auto_common', 'float32', 'bfloat16', 'float16' or "
            "'float64', but is 'bf17' instead.",
        ),
        ("trainer__early_stopping__patience", -1, "`trainer.early_stopping.patience` must be greater than 0"),
        ("launch__port", 65536, "`launch.port` must be less than or equal to 65535, but is 65536 instead."),
        ("comm", None, "`comm` must be"),
        ("trainer", [], "`trainer` must be"),
        (
            "hardware__devices",
            [],
            "`hardware.devices` must be a list with at least one entry, but is [] instead.",
        ),
    ],
)
def test_values_are_not_converted(
    problems: Callable[..., list[str]], key: str, value: Any, told: str
) -> None:
    found = problems(**{key: value})
    assert len(found) == 1, found
    assert found[0].startswith(told)


@pytest.mark.parametrize(("given", "meant"), [(True, 1), (False, 0), (3, 3)])
def test_fast_dev_run_takes_a_boolean(default: dict[str, Any], given: bool | int, meant: int) -> None:
    raw = copy.deepcopy(default)
    raw["trainer"]["fast_dev_run"] = given
    config = read_config(raw)
    assert config.trainer.fast_dev_run == meant
    assert type(config.trainer.fast_dev_run) is int


def test_a_whole_number_is_a_float(default: dict[str, Any]) -> None:
    raw = copy.deepcopy(default)
    raw["trainer"]["clip_norm"] = 1
    assert read_config(raw).trainer.clip_norm == 1.0


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (
            "trainer__max_stps",
            "`trainer.max_stps` is not a key of `trainer` (its value is 5). Did you mean `max_steps`?",
        ),
        (
            "trainer__early_stopping__patienc",
            "`trainer.early_stopping.patienc` is not a key of `trainer.early_stopping` (its value is 5). "
            "Did you mean `patience`?",
        ),
        ("trainr", "`trainr` is not a key of the configuration (its value is 5). Did you mean `trainer`?"),
        ("comm__qqqqqq", "`comm.qqqqqq` is not a key of `comm` (its value is 5)."),
    ],
)
def test_an_unknown_key_is_told_with_the_closest_one(
    problems: Callable[..., list[str]], key: str, told: str
) -> None:
    assert problems(**{key: 5}) == [told]


def test_a_missing_key_is_told(default: dict[str, Any]) -> None:
    raw = copy.deepcopy(default)
    del raw["trainer"]["global_batch_size"], raw["model"]
    assert sorted(check_config(raw)[1]) == [
        "`model` must be given, but is missing.",
        "`trainer.global_batch_size` must be given, but is missing.",
    ]


def test_every_problem_is_told_at_once(problems: Callable[..., list[str]], default: dict[str, Any]) -> None:
    changes = {"trainer__seed": -1, "trainer__loss": 3, "comm__backend": "mpi", "launch__ports": 1}
    found = problems(**changes)
    assert [problem.split("`")[1] for problem in found] == [
        "trainer.loss",
        "trainer.seed",
        "comm.backend",
        "launch.ports",
    ]
    raw = copy.deepcopy(default)
    raw["trainer"]["seed"], raw["trainer"]["loss"] = -1, 3
    with pytest.raises(ConfigError) as refused:
        read_config(raw)
    assert len(refused.value.problems) == 2
    assert str(refused.value).startswith("2 configuration errors:\n  1. `trainer.loss`")


# ---------------------------------------------------------------- clashes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"trainer__lr_scaling": "sqrt"},
            "`trainer.lr_scaling` must be linear, its default, where `trainer.lr_batch_size` is null, but is",
        ),
        (
            {"trainer__schedule_every": "epoch"},
            "`trainer.schedule_every` must be null where `trainer.schedule` is no class, but is 'epoch'",
        ),
        (
            {"trainer__accumulate": 2, "trainer__microbatch_size": 4},
            "`trainer.accumulate` must be 1 where `trainer.microbatch_size` is set, but is 2 instead.",
        ),
        (
            {"trainer__prefetch_factor": 4},
            "`trainer.prefetch_factor` must be 2, its default, where `trainer.num_workers` is 0, but is 4",
        ),
        (
            {"trainer__max_steps": 5, "trainer__warmup_steps": 6},
            "`trainer.warmup_steps` must be at most `trainer.max_steps` (5), but is 6 instead.",
        ),
        (
            {"trainer__early_stopping__patience": 1},
            "`trainer.eval_every` must be above 0 where `trainer.early_stopping.patience` is set, but is 0",
        ),
        (
            {"hardware__devices": [{"device": "cpu"}, {"device": "cpu", "vendor": "amd"}]},
            "`hardware.devices[1]` must name either `device` or `vendor`, but names both instead.",
        ),
        (
            {"hardware__devices": [{"count": 2}]},
            "`hardware.devices[0]` must name either `device` or `vendor`, but names neither instead.",
        ),
    ],
)
def test_values_that_clash_are_told(
    problems: Callable[..., list[str]], changes: dict[str, Any], told: str
) -> None:
    found = problems(**changes)
    assert len(found) == 1, found
    assert found[0].startswith(told)


@pytest.mark.parametrize(
    ("words", "steps_per_epoch", "sentence"),
    [
        ((), None, "Ends after 4 epochs."),
        ((), 6, "Ends after 4 epochs = 24 steps."),
        (("trainer.max_steps=120",), 6, "Ends after 120 steps."),
        (
            ("trainer.max_steps=120", "trainer.max_epochs=5"),
            None,
            "Ends after 120 steps (trainer.max_steps) or 5 epochs (trainer.max_epochs), "
            "whichever comes first.",
        ),
        (
            ("trainer.max_steps=120", "trainer.max_epochs=5"),
            6,
            "Ends after 5 epochs = 30 steps, before trainer.max_steps=120.",
        ),
        (
            ("trainer.max_steps=7", "trainer.max_epochs=2"),
            6,
            "Ends after 7 steps, before trainer.max_epochs=2 (12 steps).",
        ),
        (("trainer.max_steps=12", "trainer.max_epochs=2"), 6, "Ends after 12 steps."),
        (("debug=fast",), None, "Ends after 2 steps (trainer.fast_dev_run)."),
        (
            ("trainer.early_stopping.patience=1", "trainer.eval_every=1", "trainer.max_epochs=1"),
            None,
            "Ends after 1 epoch, or earlier after 1 evaluation without improvement "
            "(trainer.early_stopping.patience).",
        ),
    ],
)
def test_the_plan_says_what_ends_a_run(
    words: tuple[str, ...], steps_per_epoch: int | None, sentence: str
) -> None:
    """Case 98: a limit that comes later than another one is named, and a single one holds alone."""
    assert how_it_ends(read_config(composed(*words)).trainer, steps_per_epoch) == sentence


@pytest.mark.parametrize(
    ("words", "factor"),
    [
        ((), 1.0),
        (("trainer.lr_batch_size=16",), 4.0),
        (("trainer.lr_batch_size=16", "trainer.lr_scaling=sqrt"), 2.0),
        (("trainer.lr_batch_size=128",), 0.5),
    ],
)
def test_rates_follow_the_batch(words: tuple[str, ...], factor: float) -> None:
    assert read_config(composed("trainer.global_batch_size=64", *words)).trainer.lr_factor == factor


# ---------------------------------------------------------------- hardware.devices


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("cpu", [{"device": "cpu"}]),
        (["cpu", "cuda:0"], [{"device": "cpu"}, {"device": "cuda:0"}]),
        ({"vendor": "intel"}, [{"vendor": "intel"}]),
        (["cpu", {"device": "cpu:3", "count": 2}], [{"device": "cpu"}, {"device": "cpu:3", "count": 2}]),
    ],
)
def test_short_forms_of_devices(default: dict[str, Any], written: Any, meant: list[dict[str, Any]]) -> None:
    raw = copy.deepcopy(default)
    raw["hardware"]["devices"] = written
    read = [entry.model_dump(exclude_none=True) for entry in read_config(raw).hardware.devices]
    assert read == meant


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ([5], "hardware.devices[0]"),
        (7, "hardware.devices"),
        (None, "hardware.devices"),
        (["cpu", {"device": "cpu", "count": 0}], "hardware.devices[1].count"),
        ([{"vendor": "nvdia"}], "hardware.devices[0].vendor"),
        ({"device": "cpu", "count": "2"}, "hardware.devices"),
    ],
)
def test_a_wrong_device_is_told_by_its_key(
    problems: Callable[..., list[str]], written: Any, key: str
) -> None:
    found = problems(hardware__devices=written)
    assert len(found) == 1, found
    assert found[0].startswith(f"`{key}")
    assert " must be " in found[0]


def test_an_unknown_key_of_a_device_names_the_closest(problems: Callable[..., list[str]]) -> None:
    assert problems(hardware__devices=[{"device": "cpu", "cout": 2}]) == [
        "`hardware.devices[0].cout` is not a key of `hardware.devices[0]` (its value is 2). "
        "Did you mean `count`?"
    ]


@pytest.mark.parametrize("url", ["postgresql://me:secret@host/db", "postgresql://me@host/db?password=secret"])
def test_a_database_without_a_password(problems: Callable[..., list[str]], url: str) -> None:
    """Every run keeps its configuration."""
    (problem,) = problems(monitor__url=url)
    assert problem.startswith("`monitor.url` must be without a password")
    assert problems(monitor__url="postgresql://me@host/db?sslmode=require") == []


def test_the_configuration_is_read_only(default: dict[str, Any]) -> None:
    config = read_config(default)
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.seed = 1


def test_a_batch_a_device_becomes_one_global_batch() -> None:
    raw = unbuilt_config(trainer={"global_batch_size": None, "batch_size_per_device": 12})
    config, problems = check_config(raw)
    assert config is not None and problems == []
    config, resolved = for_devices(config, raw, 3)
    assert config.trainer.global_batch_size == resolved["trainer"]["global_batch_size"] == 36
    assert raw["trainer"]["global_batch_size"] is None
    assert read_config(resolved) == config  # as the ranks read it
    assert for_devices(config, resolved, 5) == (config, resolved)


def test_a_command_line_with_a_batch_a_device() -> None:
    both = ["trainer.global_batch_size=null", "trainer.batch_size_per_device=12"]
    spec = checked("hardware.devices=[cpu,cpu,cpu]", *both).accepted()
    assert spec.config.trainer.global_batch_size == spec.raw["trainer"]["global_batch_size"] == 36
    assert "A step takes 36 samples: 12 × 3 chosen devices." in spec.selection.reasons
