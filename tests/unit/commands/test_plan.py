"""`hetexp plan` and `plan_only=true`: what they print, write and refuse, without starting anything."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import checked

from hetexp.app import compose_config, conf_dir, run
from hetexp.app import main as train_main
from hetexp.cli import main
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.plan import calibrations
from hetexp.plan.calibrated_plan import choose
from hetexp.plan.planner import make_plan
from hetexp.plan.run_spec import Request

TINY = ("model=mlp", "data=synthetic", "logger=none", "hardware.check_memory=false")
MIX = ("hardware=nvidia_arc", *TINY, "model.hidden_sizes=[512,512]", "trainer.global_batch_size=4096")
ODD = "hardware.devices=[emulated:rtx_3090,cpu]"


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("hetexp.launch.processes.members.start_rank", never)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(shown(capsys, "--json", *words))
    return loaded


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    screen = capsys.readouterr()
    assert screen.out == ""
    assert "Traceback" not in screen.err
    return screen.err


def test_hyphens_before_keys_as_before_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--{word}" for word in MIX]
    with_hyphens = as_json(capsys, *words, "--objective=energy")
    assert with_hyphens == as_json(capsys, *MIX, "--objective", "energy")


def test_every_strategy_and_policy_of_the_folders(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *MIX, "hardware.check_memory=true")
    rows = {(row["strategy"], row["policy"]): row for row in found["rows"] if row["problem"] is None}
    refused = {row["strategy"] for row in found["rows"] if row["problem"] is not None}
    policies = {path.stem for path in (conf_dir() / "balancing").glob("*.yaml")} - {"manual"}
    strategies = {path.stem for path in (conf_dir() / "strategy").glob("*.yaml")} - {"single", "auto"}
    assert {"ddp", "single"} & refused == set()
    assert set(rows) == {(s, p) for s in strategies - refused for p in policies} | {("single", None)}
    assert [device["speed"] for device in found["devices"]] == ["from the catalogue"] * 2
    assert found["emulated"]
    for row in rows.values():
        pipelines = {p["stages"][0]["pipeline"]: p["samples"] for p in row["split"] if p["stages"]}
        samples = pipelines.values() if pipelines else [part["samples"] for part in row["split"]]
        assert sum(samples) == 4096
        assert row["samples_per_s"] == pytest.approx(4096 / row["predicted_step_s"])
        assert 0 < row["efficiency"] <= row["ceiling"] + 1e-9 <= 1.01
        assert row["joules_per_sample"] > 0
        assert all(part["memory_bytes"] > 0 for part in row["split"])
    best = found["rows"][found["best"]]
    exact = [row["predicted_step_s"] for row in rows.values() if row["exact"]]
    assert best["predicted_step_s"] <= 1.011 * min(exact)
    name = " + ".join(filter(None, (best["strategy"], best["policy"])))
    assert found["reasons"][0].startswith(f"{name}: 4096 samples are predicted to take")
    assert (found["what_if"], found["scale"]) == (None, None)


def test_manual_weights_and_a_policy_of_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf" / "balancing"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: hetexp.balancing.manual.Manual\nweights: [1, 7]\n")
    (folder / "odd.yaml").write_text("_target_: hetexp.balancing.equal.Equal\nspeed: 9\n")
    monkeypatch.chdir(tmp_path)
    found = as_json(capsys, *MIX, "balancing=manual", "balancing.weights=[3,1]")
    rows = {row["policy"]: row for row in found["rows"] if row["strategy"] in ("ddp", "")}
    assert [part["samples"] for part in rows["manual"]["split"]] == [3072, 1024]
    assert [part["samples"] for part in rows["mine"]["split"]] == [512, 3584]
    assert rows["mine"]["predicted_step_s"] > rows["manual"]["predicted_step_s"]
    assert "`balancing.speed` is not an argument" in rows["odd"]["problem"]


def test_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *MIX, "--what-if", "+2*rtx_4090", "--what-if", "-arc_a770")
    assert [device["id"] for device in found["devices"]] == ["emulated:0", "emulated:1"]
    then = found["what_if"]
    assert then["changes"] == ["+2*rtx_4090", "-arc_a770"]
    assert [device["name"] for device in then["devices"]] == [
        "RTX 3090 (emulated)",
        "RTX 4090 (what if)",
        "RTX 4090 (what if)",
    ]
    assert then["devices"][0] == found["devices"][0] | {"calibration": then["devices"][0]["calibration"]}
    # Where the same devices come back, so do the numbers.
    back = as_json(capsys, *MIX, "--what-if=-arc_a770,+arc_a770")["what_if"]
    rows = [[row["predicted_step_s"] for row in one["rows"]] for one in (found, back)]
    assert rows[0] == rows[1]
    text = " ".join(shown(capsys, *MIX, "--what-if", "+rtx_4090").split())
    assert "What if: +rtx_4090" in text
    assert "With these changes a step takes" in text


def test_scale(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *MIX, "--scale", "1000")["scale"]
    assert (found["num_devices"], found["num_hosts"], found["total"]) == (1000, 500, 2_048_000)
    assert [row["policy"] for row in found["rows"]] == ["equal", "tflops", "vram", "all, best split", "best"]
    assert all(row["solve_seconds"] > 0 for row in found["rows"])
    text = shown(capsys, *MIX, "--scale", "1000")
    assert "500 boxes of these 2 devices on ethernet_10g, 2,048,000 samples a step" in text
    assert "500 × 2,048" in text


@pytest.mark.parametrize("objective", [["energy"], ["budget", "--watts", "300"]])
def test_objectives(capsys: pytest.CaptureFixture[str], objective: list[str]) -> None:
    found = as_json(capsys, *MIX, "--objective", *objective)
    best = found["rows"][found["best"]]
    if objective[0] == "budget":
        assert best["policy"] in ("within 300 W", None)
        assert best["watts"] <= 300
        assert [part["device"] for part in best["split"]] == ["emulated:1"]
    else:
        rows = [row for row in found["rows"] if row["problem"] is None and row["exact"]]
        fastest = min(row["predicted_step_s"] for row in rows)
        near = [row for row in rows if row["predicted_step_s"] <= 1.05 * fastest]
        assert best["joules_per_sample"] == min(row["joules_per_sample"] for row in near)


@pytest.mark.parametrize("width", [80, 110])
def test_the_tables_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    words = ["hardware=eight_mixed", *TINY, "--what-if", "+3*t4", "--scale", "99"]
    for text in (shown(capsys, *words), shown(capsys, *words, "--details")):
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
    assert ("ceiling" in text) == (width == 110)
    for part in ("Predicted from the catalogue: 64 samples a step", "→ ", "RTX 4090 (emulated)", "3 ×"):
        assert part in text


def test_the_answer_comes_first_and_few_rows_follow(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MIX[:-1], "trainer.global_batch_size=16384"]
    text, found = shown(capsys, *words), as_json(capsys, *words)
    best = found["rows"][found["best"]]
    alone = next(row for row in found["rows"] if row["strategy"] == "single")
    gain = alone["predicted_step_s"] / best["predicted_step_s"]
    first = f"ddp on both devices: {gain:.2f} × as fast as the RTX 3090 alone (`strategy=ddp"
    assert text.startswith(first)
    assert found["answer"].startswith(first)
    assert 2 <= len([line for line in text.splitlines() if line.startswith("│")]) <= 10
    details = shown(capsys, *words, "--details")
    assert details.startswith(first)
    for policy in {row["policy"] for row in found["rows"] if row["strategy"] == "pipeline"}:
        assert re.search(rf"pipeline +│ {policy} ", details)


def test_a_batch_too_small_for_both_names_one_that_pays(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MIX[:-1], "hardware.check_memory=true"]
    found = as_json(capsys, *words, "trainer.global_batch_size=1024")
    assert found["rows"][found["best"]]["strategy"] == "single"
    assert found["answer"].startswith("The RTX 3090 alone is fastest; with `trainer.global_batch_size=")
    paying = found["paying_batch"]
    assert paying["num_devices"] == 2
    assert paying["batch_size"] in [1024 * 2**power for power in range(1, 7)]
    # With that batch both pay by the prediction itself, and with half of it they do not.
    then = as_json(capsys, *words, f"trainer.global_batch_size={paying['batch_size']}")
    best = then["rows"][then["best"]]
    alone = next(row for row in then["rows"] if row["strategy"] == "single")
    assert len(best["split"]) == 2
    gain = alone["predicted_step_s"] / best["predicted_step_s"]
    assert gain == pytest.approx(paying["gain"], rel=0.02)
    half = as_json(capsys, *words, f"trainer.global_batch_size={paying['batch_size'] // 2}")
    assert half["rows"][half["best"]]["strategy"] == "single"


def test_no_batch_that_pays(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *MIX[:-1], "trainer.global_batch_size=64")
    assert found["paying_batch"] is None
    assert found["answer"] == "The RTX 3090 alone is fastest, with any batch up to 4,096 samples that fits."


def test_what_nothing_is_known_of(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, ODD, *TINY)
    assert found["devices"][1]["speed"] == "not known"
    assert found["devices"][1]["solo_samples_per_s"] is None
    assert found["best"] is None
    equal = next(r for r in found["rows"] if (r["strategy"], r["policy"]) == ("ddp", "equal"))
    assert (equal["predicted_step_s"], equal["split"][1]["memory_bytes"]) == (None, None)
    text = " ".join(shown(capsys, ODD, *TINY).split())
    assert "No recommendation: nothing is known of cpu:0" in text
    assert "`--scale` must repeat devices that the catalogue knows" in refused(
        capsys, ODD, *TINY, "--scale", "9"
    )


def test_all_mistakes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(
        capsys,
        *("strategy=dpp", "trainer.max_stps=5", "--what-if", "rtx_4090", "--objective", "budget"),
    )
    for part in (
        "4 configuration errors",
        "`strategy` must be one of auto, ddp, ",
        "but is 'dpp' instead. Did you mean",
        "`trainer.max_stps` is not a key",
        "`--what-if` must be +card",
        "`--watts` must be given with --objective budget",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--what-if", "+rtx_4091"], "Did you mean `rtx_4090`?"),
        (["--what-if", "-rtx_4090"], "emulated:0 = rtx_3090, emulated:1 = arc_a770"),
        (["--what-if", "-emulated:0,-emulated:1"], "a change that leaves a device"),
        (["--scale", "1"], "`--scale` must be from 2, the devices given, to 100000, but is 1 instead."),
        (["--scale", "9", "hardware.network=carrier_pigeon"], "`hardware.network` must be one of"),
        (["--watts", "300"], "`--objective` must be budget if --watts is given"),
        (["--watts", "-3", "--objective", "budget"], "`--watts` must be a number above 0"),
        (["--what-if", "+arc_a770", "trainer.precision=float64"], "float64"),
        (["strategy=single"], "`strategy` must be ddp"),
        (
            ["--what-if", "+t4", "balancing=manual", "balancing.weights=[1,2]"],
            "With --what-if +t4: `balancing.weights` must be 3 numbers",
        ),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert told in refused(capsys, *MIX, *words)


@pytest.mark.parametrize("words", [["--objective", "money"], ["--scale", "many"], ["-m", "trainer.seed=0,1"]])
def test_unknown_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    assert ended.value.code == 2
    assert "hetexp plan" in capsys.readouterr().err


def test_help_without_anything_slow() -> None:
    code = (
        "import sys\n"
        "from hetexp.cli import main\n"
        "try:\n    main(['plan', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "loaded = sorted(set(sys.modules) & {'torch', 'numpy', 'pydantic', 'hydra', 'rich'})\n"
        "assert not loaded, loaded\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert "--what-if CHANGE" in answer.stdout


# ---------------------------------------------------------------- plan_only=true


def test_plan_only_prints_and_writes_the_same_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    found = run(
        compose_config([*MIX, "plan_only=true", "balancing=profiled"]),
        Request(tmp_path / "run", Path.cwd()),
        Console(file=screen, width=100),
    )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml", "prediction.json"]
    written = json.loads((tmp_path / "run" / "prediction.json").read_text())
    assert written == json.loads(json.dumps(found))
    assert written["rows"] == as_json(capsys, *MIX)["rows"]
    text = screen.getvalue()
    assert "Predicted from the catalogue: 4,096 samples a step" in text
    assert "Nothing was started (plan_only=true)" in text


def test_plan_only_in_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = [f"hydra.sweep.dir={tmp_path}", "trainer.global_batch_size=64,4096"]
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", *MIX[:-1], "plan_only=true", *sweep])
    train_main()
    folders = [path.parent.name for path in sorted(tmp_path.glob("*/prediction.json"))]
    assert folders == ["0", "1"]
    batches = [
        json.loads((tmp_path / name / "prediction.json").read_text())["global_batch"] for name in folders
    ]
    assert batches == [64, 4096]
    assert capfd.readouterr().out.count("Nothing was started") == 2


def test_what_was_measured_before_is_what_is_predicted_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path))
    spec = checked(*MIX, run_dir=tmp_path / "run").accepted()
    plan = make_plan(spec)
    curves = [DeviceCalibration(SpeedCurve(0.0, s), 0.5, 0.0, 0.0) for s in (1e-4, 3e-4)]
    told = {"devices": [one.to_dict() for one in curves], "exchange": Exchange().to_dict()}
    calibrations.store(plan, spec.config, told)
    found = as_json(capsys, *MIX)
    assert [device["speed"] for device in found["devices"]] == ["measured"] * 2
    rows = {row["policy"]: row for row in found["rows"] if row["strategy"] == "ddp"}
    assert rows["equal"]["predicted_step_s"] == pytest.approx(2048 * 3e-4)
    choice = choose(plan, curves, Exchange())
    assert rows["profiled"]["predicted_step_s"] == choice.step_seconds
    assert [part["samples"] for part in rows["profiled"]["split"]] == list(choice.split.counts)
    then = as_json(capsys, *MIX, "--what-if", "+t4")["what_if"]
    assert [device["speed"] for device in then["devices"]] == ["measured", "measured", "from the catalogue"]
    assert then["devices"][1]["solo_samples_per_s"] == pytest.approx(1 / 3e-4)
    assert "Predicted from measurements: 4,096 samples a step" in shown(capsys, *MIX)
