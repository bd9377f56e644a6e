"""Whatever stands in the files of a run folder: a clear sentence or the right result, and nothing runs."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from run_folders import write_run
from support import unbuilt_config

from hetexp.checkpoint.folder import TrainingState, save_checkpoint
from hetexp.cli import main
from hetexp.core.lines import all_rows, last_rows
from hetexp.model.mlp import MLP
from hetexp.monitor.runs import RunWatch
from hetexp.monitor.sample import host_name

EXAMPLES, AT_ONCE = 10, 21
"""Sets of malformed files of each kind, and files of a set."""
INJECTED = "<script>alert"
MODEL = {"_target_": "hetexp.model.mlp.MLP", "hidden_sizes": [4]}
DATA = {"_target_": "hetexp.data.synthetic.Synthetic", "num_samples": 8, "num_test_samples": 4}
JOB = {
    "id": "a",
    "root": "/tmp",
    "folder": "run",
    "words": ["strategy=ddp"],
    "name": "a",
    "monitor_url": None,
    "gpu_ids": ["cpu:0"],
    "cards": [{"id": "cuda:0", "backend": "cuda"}],
    "overrides": {"trainer.seed": 1},
    "experiment": None,
    "balancing": "equal",
    "stop_asked": None,
}


class Planted:
    """Writes a file when it is loaded, as any pickle may."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pickle and a whole run in `run`."""
    folder = tmp_path_factory.mktemp("strange")
    torch.save(Planted(folder / "marker"), folder / "planted.pt")
    config = unbuilt_config(model=MODEL, data=DATA)
    config["trainer"] |= {"seed": 0, "loss": "cross_entropy"}
    run = write_run(folder / "run", plan={"config": config}, solo=[50.0, 50.0])
    (run / ".hydra").mkdir()
    (run / ".hydra" / "overrides.yaml").write_text('["strategy=ddp", "trainer.seed=1"]')
    (run / "job.json").write_text(json.dumps(JOB))
    shutil.copytree(run, folder / "plain")
    model = MLP(hidden_sizes=[4], input_shape=[16], num_classes=4)
    extra = {"run_id": "run", "progress": {"samples": 8}, "devices": [], "config": config | {"resume": None}}
    state = TrainingState(4, {"epoch": 1, "offset": 0}, {"step": 4}, extra)
    save_checkpoint(run / "checkpoints", model, torch.optim.SGD(model.parameters(), lr=0.1), state)
    return folder


def injected(place: Path) -> list[Any]:
    """Values that would run code if anything built them."""
    load = {"f": str(place / "planted.pt"), "weights_only": False}
    return [
        {"_target_": "torch.load", **load},
        {"_target_": "hetexp.model.mlp.torch.load", **load},
        {"_target_": "hetexp.core.files.write_text", "path": str(place / "marker"), "text": "x"},
        {"_target_": "hydra.utils.call", "config": {"_target_": "torch.load", **load}},
        {**MODEL, "hidden_sizes": [{"_target_": "torch.load", **load}]},
        {"_target_": "hetexp.strategy.ddp.DDP", "_args_": [{"_target_": "torch.load", **load}]},
        {
            "_target_": "pathlib.Path.touch",
            "self": {"_target_": "pathlib.Path", "_args_": [str(place / "marker")]},
        },
        {"_target_": "${oc.env:HOME}"},
        "torch.load",
    ]


odd = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1e308, 10**400, -(2**70), float("nan"), float("inf"), "", "../x"]
    ),
    st.sampled_from(
        [[], {}, [[]], [None], {"a": None}, "\x1b[2J<script>alert(1)</script>", "a" * 3000, "ä\u2028\ud800"]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers(-300, 300) | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a value, itself first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_of(inner, (*path, key))


@st.composite
def broken(draw: st.DrawFn, text: str, strange: list[Any]) -> bytes:
    """A file of JSON, maybe of one value a line, with one to three faults."""
    whole = text.encode()
    how = draw(st.sampled_from(["values"] * 8 + ["cut", "bytes", "encoding", "deep", "any"]))
    if how == "cut":
        return whole[: draw(st.integers(0, len(whole) - 1))]
    if how == "bytes":
        at = draw(st.integers(0, len(whole) - 1))
        return whole[:at] + draw(st.binary(min_size=1, max_size=4)) + whole[at + 1 :]
    if how == "encoding":
        return text.encode(draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig", "cp037"])))
    if how == "deep":
        return draw(st.sampled_from([b'{"a":' * 3_000, b'{"a":' * 900 + b"1" + b"}" * 900]))
    if how == "any":
        return draw(odd.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
    lines = [json.loads(line) for line in text.splitlines()] if text.count("\n{") else [json.loads(text)]
    content = copy.deepcopy(lines)
    for _ in range(draw(st.integers(1, 3))):
        *outer, last = draw(st.sampled_from([path for path in paths_of(content) if len(path) > 0]))
        inside: Any = content
        for key in outer:
            inside = inside[key]
        if draw(st.integers(0, 3)) == 0:
            del inside[last]
        else:
            inside[last] = copy.deepcopy(draw(odd | st.sampled_from(strange)))
        if not content:
            break
    return "\n".join(json.dumps(value) for value in content).encode()


def tree(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.relative_to(folder).parts[0] not in ("out", "many")}


@pytest.fixture
def reads(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Run a command that reads, and check that it ends as it should; return its exit code."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # these files need not outlast a power cut

    def read(*words: str) -> int:
        before = tree(place)
        shutil.rmtree(place / "out", ignore_errors=True)
        code = main([*words])
        screen = capfd.readouterr()
        assert code in (0, 1, 2)
        assert "Traceback" not in screen.out + screen.err
        assert "\x1b" not in screen.out + screen.err
        if code:
            assert screen.err.strip(), "it must say why"
            assert len(screen.err.splitlines()) < 4
        assert tree(place) == before, "nothing is written elsewhere"
        if (place / "out" / "report.html").exists():
            assert INJECTED not in (place / "out" / "report.html").read_text()
        return code

    return read


def fuzzed(function: Callable[..., None]) -> Callable[..., None]:
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.large_base_example]
    slow += [HealthCheck.data_too_large]
    decorate = settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=slow,
        phases=[Phase.generate],
    )
    return decorate(given(data=st.data())(function))


def strange(data: st.DataObject, place: Path, name: str) -> list[Path]:
    """Return runs each of which has a strange file."""
    shutil.rmtree(place / "many", ignore_errors=True)
    runs = []
    for number in range(AT_ONCE):
        run = place / "many" / str(number)
        shutil.copytree(place / "plain", run)
        (run / name).write_bytes(data.draw(broken((place / "plain" / name).read_text(), injected(place))))
        runs.append(run)
    return runs


def report(runs: list[Path], place: Path, reads: Callable[..., int]) -> None:
    """Compare all runs, and each alone if that is not possible."""
    if reads("report", str(place / "many"), "--output", str(place / "out")):
        for run in runs:
            reads("report", str(run), "--output", str(place / "out"))


def monitor(run: Path) -> None:
    """Read a run as the monitor does."""
    watch = RunWatch(run)
    watch.look()
    for device, _ in watch.devices:
        watch.modelled(device)
    watch.close()


@fuzzed
def test_plan(data: st.DataObject, place: Path, reads: Callable[..., int]) -> None:
    runs = strange(data, place, "plan.json")
    report(runs, place, reads)
    for run in runs:
        reads("diagram", str(run), "--format", "mmd", "--output", str(place / "out"))
        monitor(run)


@fuzzed
def test_summary(data: st.DataObject, place: Path, reads: Callable[..., int]) -> None:
    report(strange(data, place, "summary.json"), place, reads)


@fuzzed
def test_metrics(data: st.DataObject, place: Path, reads: Callable[..., int]) -> None:
    runs = strange(data, place, "metrics.jsonl")
    report(runs, place, reads)
    for run in runs:
        path = run / "metrics.jsonl"
        assert all(isinstance(row, dict) for row in [*all_rows(path), *last_rows(path, 1000)])
        monitor(run)


@fuzzed
def test_configuration(data: st.DataObject, place: Path, reads: Callable[..., int]) -> None:
    """A run without a plan is known by the words that Hydra has stored; `config.yaml` is never read."""
    runs = strange(data, place, ".hydra/overrides.yaml")
    for run in runs:
        (run / "plan.json").unlink()
        (run / "config.yaml").write_text(json.dumps({"model": injected(place)[0]}))
    report(runs, place, reads)


@fuzzed
def test_state_of_a_checkpoint(data: st.DataObject, place: Path, reads: Callable[..., int]) -> None:
    folder = place / "run" / "checkpoints" / "step_00000004"
    texts = [(folder / name).read_text() for name in ("state.json", "manifest.json")]
    try:
        for number in range(AT_ONCE):
            content = data.draw(broken(texts[0], injected(place)))
            (folder / "state.json").write_bytes(content)
            manifest = json.loads(texts[1])
            manifest["files"]["state.json"] = {
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
            (folder / "manifest.json").write_text(json.dumps(manifest))
            out = ["--output", str(place / "out")]
            reads("export", str(place / "run"), *out)
            if number == 0:
                reads("merge", str(place / "run"), str(folder), *out)
                reads("harvest", str(place / "run"), "--layer", "layers.0", *out)
    finally:
        for name, text in zip(("state.json", "manifest.json"), texts, strict=True):
            (folder / name).write_text(text)


@fuzzed
def test_manifest_of_a_checkpoint(data: st.DataObject, place: Path, reads: Callable[..., int]) -> None:
    path = place / "run" / "checkpoints" / "step_00000004" / "manifest.json"
    text = path.read_text()
    try:
        for number in range(AT_ONCE):
            path.write_bytes(data.draw(broken(text, injected(place))))
            which = ["", "/best", "/step:4"][number % 3]
            reads("export", f"{place / 'run'}{which}", "--output", str(place / "out"))
    finally:
        path.write_text(text)


@fuzzed
def test_a_training_of_the_dashboard(data: st.DataObject, place: Path) -> None:
    """Its page shows whatever a run's files have."""
    jobs = pytest.importorskip("hetexp.web.jobs", reason="the extra `monitor` is not installed")
    from hetexp.web import views
    from hetexp.web.job import read_job
    from hetexp.web.refused import RefusedError

    name = data.draw(st.sampled_from(["job.json", "job.json", "plan.json", "summary.json", "metrics.jsonl"]))
    for run in strange(data, place, name):
        for state in ("completed", "running"):
            row = {
                "id": "a",
                "name": "a",
                "state": state,
                "host": host_name(),
                "run_dir": str(run),
                "pid": None,
            }
            shown = views.training(row, with_log=True)
            json.dumps([shown, views.metrics(row, 0, 10)], allow_nan=False)
            read_job(run)
        row["state"] = "completed"
        if int(run.name) % 4 == 0:
            with contextlib.suppress(RefusedError):
                jobs.report_of(row)
    assert not (place / "marker").exists()


@pytest.mark.parametrize(
    "name", ["plan.json", "summary.json", "metrics.jsonl", ".hydra/overrides.yaml", "job.json"]
)
def test_no_reading_waits_for_a_pipe_or_never_ends(place: Path, reads: Callable[..., int], name: str) -> None:
    for kind in ("pipe", "endless", "folder"):
        shutil.rmtree(place / "many", ignore_errors=True)
        run = place / "many" / kind
        shutil.copytree(place / "plain", run)
        (run / name).unlink()
        if kind == "pipe":
            os.mkfifo(run / name)
        elif kind == "endless":
            (run / name).symlink_to("/dev/zero")
        else:
            (run / name).mkdir()
        if name.startswith(".hydra"):
            (run / "plan.json").unlink()
        reads("report", str(run), "--output", str(place / "out"))
        if name == "plan.json":
            assert reads("diagram", str(run), "--output", str(place / "out")) == 2
        watch = RunWatch(run)
        watch.look()
        watch.close()
