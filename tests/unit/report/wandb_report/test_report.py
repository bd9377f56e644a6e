"""The W&B report: its spec offline, what selects its runs, and what keeps it from being saved."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import plan_on, unbuilt_config

from hetexp.commands.report import main
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, SetupError
from hetexp.core.files import write_json
from hetexp.core.summary import blank_summary
from hetexp.report.comparison import compare
from hetexp.report.results import Comparison
from hetexp.report.runs import read_runs
from hetexp.report.wandb_report.report import build, destination, save, spec_of

pytest.importorskip("wandb_workspaces")
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")

WANDB = {"_target_": "hetexp.logger.wandb.WandbLogger", "project": "mixed", "entity": None}
NONE = {"_target_": "hetexp.logger.base.NoLogger"}
LINE = {
    "step": 5,
    "train/loss": 0.5,
    "train/samples": 40,
    "samples_per_second": 10.0,
    "step_seconds": 0.8,
    "device/card:0/share": 0.75,
    "device/card:1/share": 0.25,
    "balancing/weight/card:0": 0.75,
    "balancing/weight/card:1": 0.25,
}


def write_run(
    folder: Path,
    strategy: str,
    *,
    emulated: bool = True,
    failed: bool = False,
    group: str | None = "compare",
    logger: dict[str, Any] = WANDB,
) -> None:
    """Write a run folder of two cards as a run leaves it behind."""
    kind = "emulated" if emulated else "cuda"
    devices = [DeviceSpec(f"card:{n}", kind, n, "Card", "nvidia") for n in (0, 1)]
    config = unbuilt_config(trainer={"seed": 0}, logger=logger)
    plan = plan_on(devices, config, run_dir=str(folder), run_id=folder.name, group=group, strategy=strategy)
    choices = {"strategy": strategy, "balancing": "equal", "model": "mlp"}
    plan = replace(plan, choices=choices, overrides=(f"strategy={strategy}",))
    summary = blank_summary(plan, "failed" if failed else "completed")
    if failed:
        summary["error"] = "ValueError: the model | broke\nsecond line"
    else:
        summary |= {"valid": True, "steps": 5, "samples": 40, "samples_per_s": 10.0, "measured_step_s": 0.8}
        summary |= {"efficiency": 0.9, "final": {"train_loss": 0.5, "eval": {"loss": 0.6}}}
        summary |= {"lost_to": dict.fromkeys(summary["lost_to"], 0.02)}
        summary |= {"time_scale": 20.0} if emulated else {}
        summary["comm"]["bytes_per_step"] = 100.0
        for device in summary["devices"]:
            device["steps"] = 5
    folder.mkdir(parents=True)
    plan.write(folder / "plan.json")
    write_json(folder / "summary.json", summary)
    (folder / "metrics.jsonl").write_text(f"{json.dumps(LINE)}\n")


def comparison(folder: Path, *strategies: str, **options: Any) -> Comparison:
    """Return the comparison of a run a strategy."""
    for name in strategies:
        write_run(folder / name, name, **options)
    return compare(read_runs([folder]), "Two cards")


def found(spec: Any, kind: str) -> list[dict[str, Any]]:
    """Return all objects of a class in a spec."""
    if isinstance(spec, list):
        return [one for item in spec for one in found(item, kind)]
    if not isinstance(spec, dict):
        return []
    own = [spec] if spec.get("type") == kind else []
    return own + [one for item in spec.values() for one in found(item, kind)]


def text_of(spec: Any) -> str:
    return "\n".join(block["text"] for block in found(spec, "MarkdownBlock"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("somebody went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A person who has never logged in, and a server that is not there."""
    for name in ("WANDB_API_KEY", "NETRC", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


class TestSpec:
    def test_is_plain_stable_and_offline(self, tmp_path: Path, no_network: None) -> None:
        compared = comparison(tmp_path, "ddp", "pipeline")
        first, again = (spec_of(build(compared, "team", "mixed")) for _ in range(2))
        assert first == again == json.loads(json.dumps(first))
        assert (first["entity"], first["project"], first["title"]) == ("team", "mixed", "Two cards")
        titles = [block["text"] for block in found(first, "H2")]
        assert titles == [
            "Variants",
            "Throughput and efficiency",
            "Loss",
            "Split",
            "Settings against results",
            "Runs compared",
        ] + ["Notes"] * bool(compared.notes)

    def test_wandb_itself_takes_it(self, tmp_path: Path, no_network: None) -> None:
        """Its own conversion of what it sends, but for the look-up of the runs' project."""
        report = build(comparison(tmp_path, "ddp"), "team", "mixed")
        for block in report.blocks:
            for runset in getattr(block, "runsets", ()):
                runset.entity = runset.project = ""
        model: Any = report._to_model()  # type: ignore[no-untyped-call]
        sent = model.spec.model_dump(by_alias=True, exclude_none=True)
        grids = [block["metadata"] for block in sent["blocks"] if block["type"] == "panel-grid"]
        assert len(grids) == 5
        for grid in grids:
            keys = {item["key"]["name"]: item["value"] for item in grid["runSets"][0]["filters"]["filters"]}
            assert keys == {"group": "compare", "state": "finished"}
        panels = [panel for grid in grids for panel in grid["panelBankSectionConfig"]["panels"]]
        (parallel,) = [panel for panel in panels if panel["viewType"] == "Parallel Coordinates Plot"]
        assert [column["accessor"] for column in parallel["config"]["columns"]][:3] == [
            "summary:balancing/weight/card:0",
            "summary:balancing/weight/card:1",
            "config:trainer.value.global_batch_size",
        ]

    def test_panels_show_what_was_logged(self, tmp_path: Path) -> None:
        spec = spec_of(build(comparison(tmp_path, "ddp", "pipeline"), "team", "mixed"))
        lines = {panel["title"]: (panel["x"], panel["y"]) for panel in found(spec, "LinePlot")}
        devices = ("card:0", "card:1")
        assert lines == {
            "Loss over steps, emulated": ("trainer/step", ["train/loss"]),
            "Loss over samples, emulated": ("train/samples", ["train/loss"]),
            "Loss over time, emulated": ("RelativeTime(Process)", ["train/loss"]),
            "Share of the samples, by device, emulated": (
                "trainer/step",
                [f"device/{one}/share" for one in devices],
            ),
            "Weight that the policy gives, by device, emulated": (
                "trainer/step",
                [f"balancing/weight/{one}" for one in devices],
            ),
        }
        assert {bar["metrics"][0] for bar in found(spec, "BarPlot")} == {"samples_per_s", "efficiency"}
        assert {one["metric"] for one in found(spec, "ScalarChart")} == {
            "samples_per_s",
            "efficiency",
            "final.train_loss",
        }
        assert len(found(spec, "RunComparer")) == 1

    def test_paced_runs_are_shown_in_modelled_time(self, tmp_path: Path) -> None:
        """Each has a time scale of its own: this machine's seconds tell nothing."""
        spec = spec_of(build(comparison(tmp_path, "ddp"), None, "mixed"))
        (bar, _), (scalar, *_) = found(spec, "BarPlot"), found(spec, "ScalarChart")
        product = ["${summary:samples_per_s} * ${summary:time_scale}"]
        assert bar["custom_expressions"] == scalar["custom_expressions"] == product
        (over_time,) = [one for one in found(spec, "LinePlot") if one["title"].startswith("Loss over time")]
        assert over_time["xaxis_expression"] == "${_runtime} / ${summary:time_scale}"
        columns = found(spec, "ParallelCoordinatesPlotColumn")
        assert "samples_per_s" not in [column["metric"]["name"] for column in columns]

    def test_emulation_is_labelled_and_its_absence_too(self, tmp_path: Path) -> None:
        emulated = spec_of(build(comparison(tmp_path / "a", "ddp"), None, "mixed"))
        real = spec_of(build(comparison(tmp_path / "b", "ddp", emulated=False), None, "mixed"))
        kinds = ("BarPlot", "LinePlot", "ScalarChart", "ParallelCoordinatesPlot")
        titles = [panel["title"] for kind in kinds for panel in found(emulated, kind)]
        assert len(titles) == 11 and all(title.endswith(", emulated") for title in titles)
        assert found(emulated, "CalloutBlock")[0]["text"].startswith("Emulated devices")
        assert "emulated" not in json.dumps(real)
        assert "custom_expressions" not in json.dumps(real)
        assert "samples_per_s" in [c["metric"]["name"] for c in found(real, "ParallelCoordinatesPlotColumn")]

    def test_variants_and_failures_are_told(self, tmp_path: Path) -> None:
        write_run(tmp_path / "broken", "hybrid", failed=True)
        compared = comparison(tmp_path, "ddp", "pipeline")
        text = text_of(spec_of(build(compared, None, "mixed")))
        assert compared.answer in text
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1
        assert compared.best is not None
        assert f"**{compared.best.label}** | 1 | 200.0" in text  # samples a modelled second
        assert "1 did not complete" in text
        assert "- `strategy=hybrid`: failed: ValueError: the model | broke" in text

    def test_nothing_completed(self, tmp_path: Path) -> None:
        spec = spec_of(build(comparison(tmp_path, "ddp", failed=True), None, "mixed"))
        assert not found(spec, "PanelGrid")
        assert "1 did not complete" in text_of(spec)


class TestFilters:
    def filters(self, tmp_path: Path, *groups: str | None) -> str:
        for number, group in enumerate(groups):
            write_run(tmp_path / f"run-{number}", "ddp", group=group)
        (filters,) = {one["filters"] for one in found(spec_of(self.built(tmp_path)), "Runset")}
        return str(filters)

    def built(self, folder: Path) -> Any:
        return build(compare(read_runs([folder]), "x"), None, "mixed")

    def test_by_group(self, tmp_path: Path) -> None:
        text = self.filters(tmp_path, "a/b-1", "a/b-1")
        assert text == "Metric(\"Group\") == 'a/b-1' and Metric(\"State\") == 'finished'"

    def test_by_several_groups(self, tmp_path: Path) -> None:
        assert "Metric(\"Group\") in ['a', 'b']" in self.filters(tmp_path, "a", "b")

    @pytest.mark.parametrize("group", [None, "lr=0.1", "it's"], ids=["none", "a sign", "a quote"])
    def test_by_ids_where_no_group_can_be_told(self, tmp_path: Path, group: str | None) -> None:
        assert "Metric(\"ID\") in ['run-0', 'run-1']" in self.filters(tmp_path, group, group)


class TestWhere:
    def test_the_runs_own_project(self, tmp_path: Path) -> None:
        compared = comparison(tmp_path, "ddp", "pipeline", logger=WANDB | {"entity": "team"})
        assert destination(compared, None, None) == ("team", "mixed")
        assert destination(compared, "others", "elsewhere") == ("others", "elsewhere")

    def test_one_of_several_loggers(self, tmp_path: Path) -> None:
        several = {"_target_": "hetexp.logger.multi.MultiLogger", "loggers": [NONE, WANDB]}
        assert destination(comparison(tmp_path, "ddp", logger=several), None, None) == (None, "mixed")

    def test_not_logged_to_wandb(self, tmp_path: Path) -> None:
        compared = comparison(tmp_path, "ddp", logger=NONE)
        with pytest.raises(ConfigError, match=r"`--project` must be given .* no run has logger=wandb"):
            destination(compared, None, None)
        assert destination(compared, None, "mixed") == (None, "mixed")

    def test_several_projects_and_entities(self, tmp_path: Path) -> None:
        comparison(tmp_path, "ddp", logger=WANDB | {"entity": "one"})
        compared = comparison(tmp_path, "pipeline", logger=WANDB | {"project": "other", "entity": "two"})
        with pytest.raises(ConfigError, match="`--project` must be given .*mixed, other"):
            destination(compared, None, None)
        with pytest.raises(ConfigError, match="`--entity` must be given .*one, two"):
            destination(compared, None, "mixed")


class TestCommand:
    def test_dry_run_prints_the_spec(
        self, tmp_path: Path, no_network: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_run(tmp_path / "sweep" / "0", "ddp")
        assert main([str(tmp_path / "sweep"), "--wandb", "--dry-run", "--entity", "team"]) == 0
        spec = json.loads(capsys.readouterr().out)
        assert (spec["type"], spec["title"], spec["entity"], spec["project"]) == (
            "Report",
            "sweep",
            "team",
            "mixed",
        )

    def test_hetexp_report_has_it(
        self, tmp_path: Path, no_network: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_run(tmp_path / "run", "ddp")
        words = [str(tmp_path), "--dry-run", "--entity", "team"]
        assert main([*words, "--wandb", "--title", "Mine"]) == 0
        assert json.loads(capsys.readouterr().out)["title"] == "Mine"
        assert not list(tmp_path.glob("report.*"))
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "`--dry-run` must be given together with --wandb." in told
        assert "`--entity` must be" in told and "--project" not in told

    def test_saved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """As W&B would answer; its own functions go to the network."""
        import wandb
        from wandb_workspaces.reports.v2 import interface as reports

        saved: list[Any] = []
        monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(default_entity="me"))
        monkeypatch.setattr(reports.Report, "save", lambda self: saved.append(self))
        monkeypatch.setattr(reports.Report, "url", property(lambda self: f"https://there/{self.entity}"))
        write_run(tmp_path / "run", "ddp")
        (tmp_path / "run" / "wandb" / "offline-run-1").mkdir(parents=True)
        assert main([str(tmp_path), "--wandb", "--title", "Mine"]) == 0
        told = capsys.readouterr()
        assert told.out == "https://there/me\n"
        assert "1 of the runs were logged offline" in told.err
        assert [(report.title, report.project) for report in saved] == [("Mine", "mixed")]

    def test_without_the_library(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in [name for name in sys.modules if name.startswith("wandb_workspaces")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
        write_run(tmp_path / "run", "ddp")
        for more in ([], ["--dry-run"]):
            assert main([str(tmp_path), "--wandb", *more]) == 2
            assert "pip install 'hetexp[wandb-report]'" in capsys.readouterr().err

    def test_no_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(tmp_path), "--wandb", "--dry-run"]) == 2
        assert "`FOLDER` must be" in capsys.readouterr().err


class TestTrouble:
    def test_not_logged_in(self, tmp_path: Path, logged_out: None) -> None:
        with pytest.raises(
            SetupError, match="you are not logged in; run `wandb login`, or set WANDB_API_KEY"
        ):
            save(comparison(tmp_path, "ddp"), "team", "mixed")

    def test_no_answer_in_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import wandb

        with held_up() as hang:
            monkeypatch.setattr(wandb, "Api", hang)
            with pytest.raises(SetupError, match=r"must answer within 0.1 s, but does not"):
                save(comparison(tmp_path, "ddp"), None, "mixed", seconds=0.1)

    def test_whatever_wandb_raises_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from wandb_workspaces.reports.v2 import interface as reports

        def refuse(self: Any) -> None:
            raise ValueError("project 'team/mixed' not found")

        monkeypatch.setattr(reports.Report, "save", refuse)
        with pytest.raises(SetupError, match="take the report for team/mixed, but does not: project"):
            save(comparison(tmp_path, "ddp"), "team", "mixed")


@contextlib.contextmanager
def held_up() -> Iterator[Any]:
    """Give a function that returns when the block ends only, and see that it does."""
    free, returned = threading.Event(), threading.Event()

    def hang() -> SimpleNamespace:
        free.wait(30)
        returned.set()
        return SimpleNamespace(default_entity=None)

    try:
        yield hang
    finally:
        free.set()
        assert returned.wait(10)
