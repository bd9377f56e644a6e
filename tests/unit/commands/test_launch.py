"""What `hetexp launch` makes of what was typed, before any process starts."""

from __future__ import annotations

import json
from pathlib import Path

import own_loop
import pytest

from hetexp.cli import main
from hetexp.commands.launch import make, parse
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.plan.run_spec import RunSpec

SCRIPT = own_loop.__file__
HERE = "{name: a, address: 127.0.0.2}"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # puts sys.path back afterwards


def made(*words: str) -> tuple[Plan, RunSpec]:
    return make(*parse(words))


def test_a_plan_of_a_script(tmp_path: Path) -> None:
    plan, spec = made(
        SCRIPT, "hardware=nvidia_arc", "balancing=tflops", "--", "case", "--steps", "3", "hardware=cpu"
    )
    assert plan.script == SCRIPT
    assert plan.script_arguments == ("case", "--steps", "3", "hardware=cpu")
    assert [device.id for device in plan.devices] == ["emulated:0", "emulated:1"]
    assert plan.shares[0] > 0.6
    assert plan.choices == {"hardware": "nvidia_arc", "strategy": "ddp", "balancing": "tflops"}
    config = spec.config
    assert (config.model, config.data, config.optimizer) == ({}, {}, {})
    assert Path(plan.run_dir).parent.parent == tmp_path / "outputs"
    assert (Path(plan.run_dir) / "config.yaml").exists()
    assert any(
        reason.startswith("Policy tflops splits each batch of own_loop.py: ") for reason in plan.reasons
    )
    assert not any("samples a step" in reason for reason in plan.reasons)
    path = tmp_path / "plan.json"
    plan.write(path)
    assert Plan.read(path) == plan


def test_auto_follows_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetexp.hardware.backends.cpu._native_precisions", lambda: ("float32", "bfloat16"))
    plan, _ = made(SCRIPT, "hardware.devices=[cpu,cpu]", "trainer.precision=bf16", "hydra.run.dir=mine")
    assert plan.choices["balancing"] == "auto"
    assert plan.shares == (0.5, 0.5)
    assert Path(plan.run_dir).name == "mine"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing.py"], "`script` must be a Python file, but is 'nothing.py' instead."),
        (["hardware=cpu", SCRIPT], "The script comes first: hetexp launch script.py hardware=…"),
        ([SCRIPT, "model=gpt"], "`model` must be absent with hetexp launch, but is 'gpt' instead."),
        ([SCRIPT, "+data.x=1"], "`data.x` must be absent with hetexp launch"),
        ([SCRIPT, "trainer.max_steps=3"], "what it reads itself comes after `--`"),
        ([SCRIPT, "hardware.devices=[cqu]"], "`hardware.devices[0]"),
        ([SCRIPT, "hardware=cqu"], "Did you mean `cpu`?"),
        ([SCRIPT, "balancing=profiled"], "`balancing` must be one of auto, adaptive,"),
        ([SCRIPT, "trainer.precision=float64", "hardware=cpu"], "after model.double() all is float64"),
        (
            [SCRIPT, "trainer.precision=float16", "hardware.devices=['emulated:rtx_3090']"],
            "cannot leave a step out",
        ),
        ([SCRIPT, "plan_only=true"], "`plan_only` must be false with hetexp launch"),
        ([SCRIPT, "strategy=single", "hardware.devices=[cpu,cpu]"], "`strategy` must be ddp for 2 devices"),
        (
            [SCRIPT, "strategy=single", "strategy._target_=mine.Own", "hardware=cpu"],
            "`strategy` must be ddp or",
        ),
        ([SCRIPT, "resume=nowhere", "hardware=cpu"], "`resume`"),
        ([SCRIPT, "balancing=manual", "hardware.devices=[cpu,cpu]"], "`balancing.weights`"),
        ([SCRIPT, "hydra.run.dir=old"], "`hydra.run.dir` must be a new folder"),
        (
            [SCRIPT, f"cluster.hosts=[{HERE},{{name: b, address: 127.0.0.3}}]", "node=a", "hardware=cpu"],
            "`cluster.hosts` must be empty (cluster=none), but is",
        ),
    ],
)
def test_refusals(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "plan.json").write_text(json.dumps({}))
    (tmp_path / "mine.py").write_text(
        "from hetexp.strategy.single import Single\n\n\nclass Own(Single):\n    name = 'own'\n"
    )

    def never(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("hetexp.launch.processes.members.start_rank", never)
    assert main(["launch", *words]) == 2
    screen = capsys.readouterr()
    assert told in screen.err
    assert "Traceback" not in screen.err + screen.out
    assert not (tmp_path / "outputs").exists()


def test_every_mistake_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        made("nothing.py", "model=gpt", "balancing=profiled", "hardware=cpu")
    assert len(caught.value.problems) == 3


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--help"])
    assert ended.value.code == 0
    screen = capsys.readouterr().out
    assert "hetexp launch script.py hardware=nvidia -- --epochs 3" in screen
