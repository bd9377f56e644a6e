"""What commands share: exit codes, and whose code they run when they read a folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import write_run
from support import unbuilt_config

from hetexp.checkpoint.folder import TrainingState, save_checkpoint
from hetexp.cli import main
from hetexp.commands.support.command_line import exit_code
from hetexp.core.errors import ConfigError, RunFailedError, SetupError
from hetexp.core.instantiate import instantiate
from hetexp.data.base import build_data
from hetexp.model.base import build_model
from hetexp.model.mlp import MLP
from hetexp.monitor.sample import host_name

STRATEGY = {"_target_": "hetexp.strategy.ddp.DDP"}
MODEL = {"_target_": "hetexp.model.mlp.MLP", "hidden_sizes": [4]}
DATA = {"_target_": "hetexp.data.synthetic.Synthetic", "num_samples": 32, "num_test_samples": 16}
OWN = """\
from pathlib import Path

from hetexp.data.synthetic import Synthetic
from hetexp.model.exported import Exported
from hetexp.model.mlp import MLP
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.training.loss import CrossEntropy

Path(__file__).with_name("marker").touch()


class Strategy(LocalSGD):
    pass


class Data(Synthetic):
    pass


class Loss(CrossEntropy):
    pass


class Net(MLP):
    @staticmethod
    def exported(tensors, state):
        return Exported("own.safetensors", tensors, {"own.json": {}})
"""


def test_what_is_refused_is_told_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise ConfigError("`--weights` must be two numbers, but is one instead.")

    assert exit_code(refuse) == exit_code(refuse, drives_torch=False) == 2
    assert capsys.readouterr().err.count("`--weights` must be two numbers") == 2


def test_how_other_errors_end(capsys: pytest.CaptureFixture[str]) -> None:
    def ended(error: BaseException) -> int:
        def run() -> int:
            raise error

        return exit_code(run, drives_torch=False, failure=1)

    assert ended(ConfigError("a")) == 2
    assert ended(SetupError("b")) == 1
    assert ended(RunFailedError("c", 7)) == 7
    assert ended(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "Configuration error: a\nb\nc\n"


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "many"])
def test_a_number_that_is_not_above_0(capsys: pytest.CaptureFixture[str], text: str) -> None:
    for words in (["gpus", "--watch", text], ["sync", "--timeout", text]):
        with pytest.raises(SystemExit):
            main(words)
        assert f"{words[1]}: must be a number above 0, but is {text} instead" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many"])
def test_a_count_below_1(capsys: pytest.CaptureFixture[str], text: str) -> None:
    for words in (["verify", "--steps", text], ["harvest", "run", "--limit", text]):
        with pytest.raises(SystemExit):
            main(words)
        assert f"must be a whole number of at least 1, but is {text} instead" in capsys.readouterr().err


def test_a_command_says_itself_how_it_ended() -> None:
    assert [exit_code(lambda: code, drives_torch=False) for code in (0, 1)] == [0, 1]


class Planted:
    """Writes a file when it is loaded, as any pickle may."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a stranger's code writes: a pickle beside it, or the module `strangers_code`."""
    torch.save(Planted(tmp_path / "marker"), tmp_path / "planted.pt")
    (tmp_path / "strangers_code.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "strangers_code", raising=False)
    return tmp_path / "marker"


def planted(marker: Path, target: str = "torch.load") -> dict[str, Any]:
    return {"_target_": target, "f": str(marker.with_name("planted.pt")), "weights_only": False}


def stored(folder: Path, loss: str = "cross_entropy", **sections: Any) -> Path:
    """Write a run as a stranger may have it: its plan and its checkpoint name these classes."""
    config = unbuilt_config(**{"strategy": STRATEGY, "model": MODEL, "data": DATA, **sections})
    config["trainer"] |= {"seed": 0, "loss": loss}
    write_run(folder, plan={"config": config})
    model = MLP(hidden_sizes=[4], input_shape=[16], num_classes=4)
    extra = {
        "run_id": folder.name,
        "progress": {"samples": 32},
        "devices": [],
        "config": config | {"resume": None},
    }
    state = TrainingState(4, {"epoch": 1, "offset": 0}, {"step": 4}, extra)
    save_checkpoint(folder / "checkpoints", model, torch.optim.SGD(model.parameters(), lr=0.1), state)
    return folder


def words_of(command: str, run: Path) -> list[str]:
    """The command that reads the run, whose output goes beside it."""
    out = str(run.with_name(f"{run.name}_{command}"))
    if command == "merge":
        return [command, str(run), str(run), "--output", out]
    more = {"harvest": ["--layer", "layers.0"], "diagram": ["--format", "mmd"]}.get(command, [])
    return [command, str(run), "--output", out, *more]


def screen_of(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert main(list(words)) == code
    screen = capsys.readouterr()
    assert "Traceback" not in screen.err
    return " ".join((screen.out + screen.err).split())


READERS = ("report", "diagram", "merge", "export", "harvest")


@pytest.mark.parametrize("target", ["torch.load", "hetexp.training.loss.torch.load"])
@pytest.mark.parametrize("command", READERS)
def test_what_is_read_runs_no_strangers_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, marker: Path, command: str, target: str
) -> None:
    bad = planted(marker, target)
    run = stored(tmp_path / "run", strategy=bad, model=bad, data=bad, optimizer=bad)
    told = screen_of(capsys, 2 if command == "harvest" else 0, *words_of(command, run))
    assert not marker.exists()
    section = "strategy" if command in ("report", "diagram") else "model"
    assert (
        f"`{section}._target_` must be a class of hetexp or of a package that you trust, but is '{target}'"
        in told
    )
    assert ("--trust torch." in told) == (target == "torch.load")


@pytest.mark.parametrize("command", READERS)
def test_a_trusted_package_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, marker: Path, command: str
) -> None:
    own = {
        "strategy": {"_target_": "strangers_code.Strategy", "sync_every": 7},
        "model": MODEL | {"_target_": "strangers_code.Net"},
        "data": DATA | {"_target_": "strangers_code.Data"},
    }
    run = stored(tmp_path / "run", loss="strangers_code.Loss", **own)
    told = screen_of(capsys, 2 if command == "harvest" else 0, *words_of(command, run))
    assert "If you trust its code, add --trust strangers_code." in told
    assert not marker.exists()
    again = stored(tmp_path / "again", loss="strangers_code.Loss", **own)
    told = screen_of(capsys, 0, *words_of(command, again), "--trust", "strangers_code")
    assert "you trust" not in told
    assert marker.exists()
    if command == "export":
        assert (tmp_path / "again_export" / "own.safetensors").is_file()
    if command == "diagram":
        assert "every 7 steps" in (tmp_path / "again_diagram" / "plan.mmd").read_text()
        assert "--trust strangers_code" in (tmp_path / "run_diagram" / "plan.mmd").read_text().replace(
            "<br/>", " "
        )
    if command == "report":
        assert "--trust strangers_code" in (tmp_path / "run_report" / "report.md").read_text()


@pytest.mark.parametrize(
    "target",
    [
        *(
            "hetexp.core.files.write_text",
            "hetexp.core.instantiate.instantiate",
            "hetexp.launch.sweep.run.Start",
        ),
        *("hetexp.data.samples.build_function", "hetexp.data.streams.stream.Generated", "torch.nn.Linear"),
        *("hetexp.model.hf_causal_lm.HFCausalLM", "hetexp.data.sft_jsonl.SftJsonl", "torch.optim.Adam"),
        *("hetexp.strategy.hierarchical_sgd.host_group.HostGroup", "pathlib.Path.touch", "joblib.load"),
        *("hydra.utils.instantiate", "numpy.load", "torch.hub.load", "builtins.exec"),
    ],
)
@pytest.mark.parametrize("command", ["report", "merge", "harvest"])
def test_names_of_hetexp_are_no_way_around(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, marker: Path, command: str, target: str
) -> None:
    """Only the classes that a reading command needs are built, not all that hetexp has."""
    bad = planted(marker, target) | {"path": str(marker), "make": planted(marker), "node": planted(marker)}
    within: dict[str, Any] = {
        "strategy": STRATEGY | {"bucket_cap_mb": bad},
        "model": MODEL | {"hidden_sizes": [bad]},
        "data": DATA | {"num_samples": {"deep": [bad]}},
    }
    everywhere: dict[str, Any] = {"strategy": bad, "model": bad, "data": bad}
    for number, sections in enumerate((everywhere, within)):
        run = stored(tmp_path / str(number), **sections)
        text = screen_of(capsys, 2 if command == "harvest" else 0, *words_of(command, run))
        assert "must be a class of hetexp or of a package that you trust" in text
        assert not marker.exists()


@pytest.mark.parametrize("command", READERS)
def test_the_current_folder_may_be_the_strangers(tmp_path: Path, marker: Path, command: str) -> None:
    """A library that is not installed is looked for, but not in the run folder."""
    run = stored(tmp_path / "run")
    library = "graphviz_of_a_stranger"
    (run / f"{library}.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    (run / "sitecustomize.py").write_text(f"import {library}")
    code = (
        "import sys; sys.path[:] = filter(None, sys.path); from hetexp.cli import main\n"
        f"code = main(sys.argv[1:])\ntry: import {library}\nexcept ImportError: pass\nsys.exit(code)"
    )
    words = [command, *words_of(command, run)[1:]]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


def test_a_class_of_the_schedule_is_not_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, marker: Path
) -> None:
    """A merge takes no step."""
    run = stored(tmp_path / "run")
    for state in (run / "checkpoints").glob("*/state.json"):
        content = json.loads(state.read_text())
        content["extra"]["config"]["trainer"]["schedule"] = planted(marker)
        rewrite(state, json.dumps(content))
    text = screen_of(capsys, 0, *words_of("merge", run))
    assert "Nothing is evaluated" not in text
    assert not marker.exists()


def rewrite(path: Path, text: str) -> None:
    """Replace a file of a checkpoint, as a stranger would: its manifest fits."""
    path.write_text(text)
    manifest = path.with_name("manifest.json")
    content = json.loads(manifest.read_text())
    digest = hashlib.sha256(text.encode()).hexdigest()
    content["files"][path.name] = {"bytes": len(text.encode()), "sha256": digest}
    manifest.write_text(json.dumps(content))


def test_nothing_is_written_into_another_users_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could make a link of any path in it, and the merge or the export would follow it."""
    run, out = stored(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    user = "54321"
    if os.geteuid():
        user = str(os.getuid())
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    else:
        for folder in (out, run):
            os.chown(folder, 54321, -1)
    refusal = "`--output` must be a folder of your own"
    export = ["export", str(run), "--output", str(out)]
    merge = ["merge", str(run), str(run / "checkpoints")]
    for words in (export, merge):
        text = screen_of(capsys, 2, *words)
        assert refusal in text
        assert "add --trust-owner" in text
        assert screen_of(capsys, 0, *words, "--trust-owner", user)


def test_packages_may_be_named_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, marker: Path
) -> None:
    run = stored(tmp_path / "run", strategy={"_target_": "strangers_code.Strategy", "sync_every": 7})
    words = [*words_of("diagram", run), "--trust", "json,strangers_code"]
    assert "you trust" not in screen_of(capsys, 0, *words)
    assert "every 7 steps" in (tmp_path / "run_diagram" / "plan.mmd").read_text()
    with pytest.raises(SystemExit):
        main([*words_of("diagram", run), "--trust", "json,"])
    assert "must be the name of a package, but is ''" in capsys.readouterr().err


def test_a_loss_is_no_way_around(capsys: pytest.CaptureFixture[str], tmp_path: Path, marker: Path) -> None:
    run = stored(tmp_path / "run", loss="strangers_code.Loss")
    for command, code in (("merge", 0), ("harvest", 2)):
        told = screen_of(capsys, code, *words_of(command, run))
        assert "`trainer.loss` must be a class of hetexp" in told
        assert not marker.exists()


def test_the_source_of_activations_is_no_way_around(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, marker: Path
) -> None:
    """Its checkpoint names classes of its own, and the configuration that names it trusts them by itself."""
    source = stored(tmp_path / "source")
    out = tmp_path / "vectors"
    screen_of(capsys, 0, "harvest", str(source), "--output", str(out), "--layer", "layers.0")
    state = Path(json.loads((out / "source.json").read_text())["checkpoint"]) / "state.json"
    content = json.loads(state.read_text())
    content["extra"]["config"]["data"] = planted(marker)
    state.write_text(json.dumps(content))
    data = {"_target_": "hetexp.data.activations.Activations", "folder": str(out)}
    run = stored(tmp_path / "run", data=data | {"loss_recovered": 5, "trust": ["torch"]})
    told = screen_of(capsys, 0, *words_of("merge", run))
    assert "Nothing is evaluated: `data._target_` must be a class of hetexp" in told
    assert not marker.exists()


def test_the_dashboards_report_runs_no_strangers_code(tmp_path: Path, marker: Path) -> None:
    jobs = pytest.importorskip("hetexp.web.jobs", reason="the extra `monitor` is not installed")
    run = stored(tmp_path / "run", strategy=planted(marker))
    row = {"id": "run", "name": "run", "state": "completed", "host": host_name(), "run_dir": str(run)}
    page = jobs.report_of(row)
    assert not marker.exists()
    assert "--trust torch to hetexp report" in page


def test_a_package_is_named_as_python_names_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--trust", "my-project/"])
    assert "must be the name of a package" in capsys.readouterr().err


def test_what_a_person_types_needs_no_trust(marker: Path) -> None:
    """Trainings build whatever their own configuration names."""
    built = build_model(MODEL | {"_target_": "strangers_code.Net"}, build_data(DATA).facts)
    assert type(built).__name__ == "Net"
    assert instantiate({"_target_": "strangers_code.Strategy", "sync_every": 2}).sync_every == 2
    assert marker.exists()
