"""Options of a group: what the shipped folder and a person's own hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetexp.app import conf_dir
from hetexp.core.compose.options import group_options
from hetexp.core.errors import ConfigError


@pytest.mark.parametrize("group", ["balancing", "strategy"])
def test_every_shipped_option_is_there(group: str) -> None:
    found = group_options(group)
    assert sorted(found) == sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
    assert all(node["_target_"].startswith("hetexp.") for node in found.values())


def test_missing_values_stay_missing() -> None:
    assert group_options("balancing")["manual"]["weights"] == "???"


def test_own_options_are_added_and_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf" / "balancing"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("defaults: [equal]\n_target_: my.Policy\n")
    (folder / "vram.yaml").write_text("_target_: my.Vram\n")
    monkeypatch.chdir(tmp_path)
    found = group_options("balancing")
    assert found["mine"] == {"_target_": "my.Policy"}
    assert found["vram"] == {"_target_": "my.Vram"}
    (folder / "broken.yaml").write_text("defaults: [nothing]\n")
    with pytest.raises(ConfigError, match="`balancing=broken` must be an option that composes"):
        group_options("balancing")


def test_only_what_is_wanted() -> None:
    assert list(group_options("balancing", only=["equal", "no such option"])) == ["equal"]


def test_what_an_option_refers_to_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option is read from its file alone only where that gives what Hydra would compose."""
    folder = tmp_path / "conf" / "balancing"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text("_target_: my.Policy\na: 3\nb: ${balancing.a}\nc: ${.a}\n")
    (folder / "other.yaml").write_text("_target_: my.Policy\nsize: ${trainer.global_batch_size}\n")
    (folder / "root.yaml").write_text("_target_: my.Policy\na: 3\nb: ${a}\n")
    monkeypatch.chdir(tmp_path)
    found = group_options("balancing", only=["own", "other"])
    assert found["own"] == {"_target_": "my.Policy", "a": 3, "b": 3, "c": 3}
    assert isinstance(found["other"]["size"], int)
    with pytest.raises(ConfigError, match="`balancing=root` must be an option that composes"):
        group_options("balancing", only=["root"])
