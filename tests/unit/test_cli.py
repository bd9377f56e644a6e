"""The command `hetexp`, completion, and a person's own `conf/`: quick, and found wherever one stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from omegaconf import OmegaConf
from own_project import write_project

import hetexp
from hetexp.app import compose_config, conf_dir
from hetexp.cli import COMMANDS, function_of, main
from hetexp.core.compose.conf_folders import name_own_conf_dir

TRAIN = str(Path(hetexp.__file__).resolve().parent.parent / "train.py")
HETEXP = "import sys; from hetexp.cli import main; sys.exit(main())"
Ask = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Run this interpreter in an empty folder, with its list of imported modules on the standard error."""

    def run(*words: str, folder: Path = tmp_path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-X", "importtime", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
        )

    return run


def imported(ended: subprocess.CompletedProcess[str]) -> set[str]:
    """Return the top-level packages that a process imported."""
    return set(re.findall(r"^import time:.*\| +(\w+)", ended.stderr, re.MULTILINE))


# ---------------------------------------------------------------- wrong keys and types


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "trainer.max_step=3"], "`trainer.max_step`"),
        (["train", "trainer.max_steps=many"], "`trainer.max_steps`"),
        (["train", "+model.hiden=3"], "`model.hiden`"),
        (["train", "model.widths=3"], "`model.widths`"),
        (["train", "+optimizer.lrr=3"], "`optimizer.lrr`"),
        (["train", "data=text", "data.folder=nowhere"], "`data.folder`"),
        (["train", "model=custom", "model._target_=no_such_package.Model"], "`model._target_`"),
        (["plan", "trainer.max_step=3"], "`trainer.max_step`"),
        (["launch", "script.py", "strategy.max_step=3"], "`strategy.max_step`"),
        (["verify", "trainer.max_step=3"], "`trainer.max_step`"),
    ],
)
def test_wrong_keys_and_types_are_reported_without_torch(
    ask: Ask, tmp_path: Path, words: list[str], key: str
) -> None:
    (tmp_path / "script.py").touch()
    ended = ask("-c", HETEXP, *words)
    assert ended.returncode == 2
    assert key in ended.stderr
    assert "torch" not in imported(ended)


# ---------------------------------------------------------------- hetexp


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_help_lists_every_command(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 0
    screen = capsys.readouterr().out
    for name, about in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(about)} \(hetexp {name} --help\)\.$", screen, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_function(name: str) -> None:
    assert callable(function_of(name))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hetexp {hetexp.__version__}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], "`command` must be one of train, but is 'trian' instead. Did you mean `train`?"),
        (["--quick"], "Did you mean `hetexp train --quick`?"),
        (["strategy=ddp", "name=x"], "Did you mean `hetexp train strategy=ddp name=x`?"),
    ],
)
def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert main(words) == 2
    screen = capsys.readouterr()
    assert screen.out == ""
    assert "`command` must be one of " in screen.err
    assert told.replace("one of train,", f"one of {', '.join(COMMANDS)},") in screen.err


def test_train_gets_the_words_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["--help", "-m", "--config-dir", "conf", "-cn", "mine", "name='a b'", "--", "+x=[1,2]"]
    seen: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hetexp"])
    monkeypatch.setattr("hetexp.app.main", lambda: seen.append(sys.argv))
    assert main(["train", *typed]) == 0
    assert seen == [["/usr/bin/hetexp", *typed]]


def test_hetexp_train_is_train_py(ask: Ask) -> None:
    words = ["--cfg", "job", "trainer.seed=4", "model=gpt"]
    one, other = ask("-c", HETEXP, "train", *words), ask(TRAIN, *words)
    assert one.returncode == other.returncode == 0
    assert one.stdout == other.stdout
    assert OmegaConf.create(one.stdout).trainer.seed == 4


def test_words_of_a_wandb_sweeps_agent(ask: Ask) -> None:
    words = ["--trainer.seed=4", "--model=gpt", "--optimizer.lr=1e-05"]
    composed = OmegaConf.create(ask(TRAIN, "--cfg=job", *words).stdout)
    assert (composed.trainer.seed, "GPT" in composed.model._target_, composed.optimizer.lr) == (4, True, 1e-5)
    wrong = ask(TRAIN, "--trainer.sed=4", "--optimizer.lr")
    assert wrong.returncode == 2
    assert "`trainer.sed` is not a key of the configuration" in wrong.stderr
    assert "`optimizer.lr` must be given as key=value" in wrong.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


@pytest.mark.parametrize(
    "words",
    [["--help"], ["train", "--help"], ["plan", "--help"], ["dashboard", "--help"], ["trian"], ["top"]],
)
def test_a_terminal_that_shows_ascii_only(ask: Ask, words: list[str], tmp_path: Path) -> None:
    wide, plain = (
        ask("-c", HETEXP, *words, HETEXP_HOME=str(tmp_path), **more)
        for more in ({"PYTHONIOENCODING": "utf-8"}, ASCII)
    )
    assert plain.returncode == wide.returncode
    assert "UnicodeEncodeError" not in plain.stderr
    assert plain.stdout.isascii()
    if words != ["top"]:  # its numbers change
        assert len(plain.stdout.splitlines()) == len(wide.stdout.splitlines())


def test_a_file_of_options_that_is_no_utf8_is_named(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes("# @package _global_\n# größe\ntrainer:\n  seed: 3\n".encode("latin-1"))
    for words in ([TRAIN], [TRAIN, "-m", "trainer.seed=0,1"], ["-c", HETEXP, "plan"]):
        ended = ask(*words, "experiment=mine")
        assert ended.returncode == 2
        assert f"`{file}` must be UTF-8, but line 2 is not" in ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["trian"]])
def test_the_command_itself_imports_nothing_slow(ask: Ask, words: list[str]) -> None:
    ended = ask("-c", HETEXP, *words)
    assert "hetexp" in imported(ended)
    assert not imported(ended) & {"torch", "numpy", "hydra", "omegaconf", "pydantic", "rich"}


# ---------------------------------------------------------------- help and completion


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--help"], "strategy: auto, ddp, "),
        (["--cfg", "job"], "global_batch_size: 64"),
        (["--shell-completion", "query=bash"], "strategy=ddp "),
        (["-sc", "install=bash"], "complete -o nospace"),
    ],
)
def test_answers_without_torch(ask: Ask, words: list[str], told: str) -> None:
    ended = ask(TRAIN, *words, COMP_LINE="train.py strategy=")
    assert ended.returncode == 0, ended.stderr
    assert told in ended.stdout
    assert "hydra" in imported(ended)
    assert not imported(ended) & {"torch", "numpy", "wandb", "sklearn"}


def test_completion_does_not_check_values(ask: Ask) -> None:
    """Nor does it import what checks them."""
    ended = ask(TRAIN, "-sc", "query=bash", COMP_LINE="train.py trainer.max_steps=many trainer.max_")
    assert ended.stdout.split() == ["trainer.max_epochs=", "trainer.max_steps="]
    assert "pydantic" not in imported(ended)


COMPLETE = """
eval "$(%s)"
for line in "$@"; do
    COMP_LINE=$line COMP_POINT=${#line} words=($line) COMPREPLY=()
    COMP_CWORD=$(( ${#words[@]} - 1 ))
    [[ $line == *" " ]] && COMP_CWORD=${#words[@]}
    hydra_bash_completion
    echo "${COMPREPLY[*]}"
done
"""


def complete(folder: Path, install: str, *lines: str) -> dict[str, list[str]]:
    """Let bash complete each line by the script that `install` prints."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "hetexp").write_text(f"#!{sys.executable}\n{HETEXP.replace('; ', chr(10))}\n")
    (programs / "hetexp").chmod(0o755)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python").chmod(0o755)
    ended = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE % install, "bash", *lines],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
    )
    return dict(zip(lines, map(str.split, ended.stdout.split("\n")), strict=False))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_hetexp(tmp_path: Path) -> None:
    lines = (
        "hetexp tr",
        "hetexp train strategy=",
        "hetexp train model=m",
        "hetexp plan model=m",
        "hetexp nothing x",
    )
    found = complete(write_project(tmp_path), "hetexp train -sc install=bash", *lines)
    assert found["hetexp tr"] == ["train"]
    assert {"strategy=ddp", "strategy=single"} <= set(found["hetexp train strategy="])
    assert {"model=mine", "model=mlp"} <= set(found["hetexp train model=m"])  # a person's own, too
    assert found["hetexp plan model=m"] == found["hetexp train model=m"]
    assert found["hetexp nothing x"] == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_train_py(tmp_path: Path) -> None:
    shutil.copy(TRAIN, tmp_path)
    lines = ("python train.py strategy=", "python train.py trainer.max_")
    found = complete(tmp_path, "python train.py -sc install=bash", *lines)
    assert {"strategy=ddp", "strategy=single"} <= set(found[lines[0]])
    assert found[lines[1]] == ["trainer.max_epochs=", "trainer.max_steps="]


@pytest.mark.parametrize(
    ("line", "told"),
    [("", COMMANDS), ("hetexp ", COMMANDS), ("/opt/bin/hetexp t", ["train"]), ("hetexp x", [])],
)
def test_completion_of_commands(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    told: Mapping[str, object] | list[str],
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert set(told) <= set(capsys.readouterr().out.split())


# ---------------------------------------------------------------- a person's own conf/


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one's own, which the test stands in."""
    folder = write_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    return folder


def folders(search_path: ConfigSearchPath) -> list[str]:
    return [element.path for element in search_path.get_path() if element.provider in ("hetexp-own", "main")]


@pytest.mark.usefixtures("project")
def test_own_options_are_added_and_win() -> None:
    assert compose_config(["model=mine"]).model._target_ == "my_net.Net"
    assert compose_config(["model=gpt"]).model._target_ == "hetexp.model.gpt.GPT"
    assert compose_config(["model=mlp"]).model == {"_target_": "my_net.Net", "hidden": 4}
    composed = compose_config(["experiment=mine"])
    assert composed.hardware.devices == ["cpu", "cpu"]
    assert composed.data._target_ == "my_points.Points"


def test_own_primary_configuration(project: Path, ask: Ask) -> None:
    ended = ask(TRAIN, "-cn", "job", "--cfg", "job", folder=project)
    composed = OmegaConf.create(ended.stdout)
    assert (composed.model._target_, composed.trainer.max_steps) == ("my_net.Net", 7)
    assert composed.trainer.global_batch_size == 64


def test_own_options_are_named_in_errors(project: Path, ask: Ask) -> None:
    for words in (["model=mien"], ["--config-dir", str(project / "conf"), "model=mien"]):
        folder = project if len(words) == 1 else project.parent
        ended = ask(TRAIN, *words, folder=folder)
        assert ended.returncode == 2
        assert re.search(r"`model` must be one of .*\bmine\b.* Did you mean `mine`\?", ended.stderr)


def test_config_dir_wins_as_well(project: Path, ask: Ask, tmp_path: Path) -> None:
    """Hydra alone would search it last, and so give the shipped option of the same name."""
    words = ["--config-dir", str(project / "conf"), "model=mlp", "--cfg", "job", "--package", "model"]
    ended = ask(TRAIN, *words, folder=tmp_path)
    assert OmegaConf.create(ended.stdout) == {"_target_": "my_net.Net", "hidden": 4}


def test_config_dir_that_is_not_there(ask: Ask) -> None:
    ended = ask(TRAIN, "--config-dir", "nowhere", "model=mlp")
    assert ended.returncode == 1
    assert re.search(r"config directory '.*/nowhere' not found", ended.stderr)


def test_order_of_the_folders(project: Path, tmp_path: Path) -> None:
    shipped, conf = str(conf_dir()), f"file://{project / 'conf'}"
    assert folders(create_config_search_path(shipped)) == [conf, shipped]
    (tmp_path / "named").mkdir()
    try:
        name_own_conf_dir(tmp_path / "named")
        named = f"file://{tmp_path / 'named'}"
        assert folders(create_config_search_path(shipped)) == [named, conf, shipped]
    finally:
        name_own_conf_dir(None)


def test_the_shipped_folder_is_not_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(conf_dir().parent)
    assert folders(create_config_search_path(str(conf_dir()))) == [str(conf_dir())]


@pytest.mark.usefixtures("project")
def test_other_hydra_applications_are_left_alone() -> None:
    assert folders(create_config_search_path("/their/conf")) == ["/their/conf"]
    assert folders(create_config_search_path(None)) == []
