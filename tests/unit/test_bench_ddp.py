"""The pure parts of `scripts/bench_ddp.py` and `scripts/bench_scaling.py`: who starts, what tables say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_scaling
import pytest
import torch
from bench_ddp import arguments_of, job_of
from benchlib.tables import median_of
from ddp_bench import page
from ddp_bench.runs import measured
from ddp_bench.task import GPT_124M, MOST_SAMPLES, TASKS, TINY, Size, data_of, num_samples, word
from ddp_bench.watch import Watch, last_step, rows_of, utilisation
from support import checked

from hetexp.hardware.backends.nvml import Card
from hetexp.model.gpt import GPT

CPU = ["--device", "cpu", "--tiny"]


@pytest.mark.parametrize("size", [GPT_124M, TINY])
def test_weights_are_counted_as_the_model_has_them(size: Size) -> None:
    with torch.device("meta"):
        model = GPT(**size.model(), vocab_size=size.vocab_size, sequence_length=size.sequence_length)  # type: ignore[arg-type]
    assert sum(p.numel() for p in model.parameters()) == size.num_parameters()


def test_the_model_has_124_million_weights() -> None:
    assert round(GPT_124M.num_parameters() / 1e6) == 124


@pytest.mark.parametrize("model", TASKS)
def test_both_see_the_same_shapes_and_whole_batches(model: str) -> None:
    assert num_samples(64, 30) == 64 * 30
    assert num_samples(96, 10_000) % 96 == 0 and num_samples(96, 10_000) <= MOST_SAMPLES
    assert num_samples(2 * MOST_SAMPLES, 5) == 2 * MOST_SAMPLES
    job = job_of(arguments_of(CPU), 2, 4, model)
    words = job.words()
    for key, value in data_of(job.task, job.global_batch_size, job.all_steps).items():
        assert f"data.{key}={word(value)}" in words


@pytest.mark.parametrize("model", TASKS)
@pytest.mark.parametrize("count", [1, 2])
def test_the_runs_may_start_on_every_processor(
    count: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_bfloat16 = ("float64", "float32")
    monkeypatch.setattr("hetexp.hardware.backends.cpu._native_precisions", lambda: without_bfloat16)
    job = job_of(arguments_of([*CPU, "--ranks", str(count)]), count, 4, model)
    assert checked(*job.words()).problems == []
    assert ("strategy=ddp" in job.words()) == (count > 1)


def test_strong_scaling_shares_one_devices_batch_and_weak_scaling_gives_each_as_much() -> None:
    jobs = bench_scaling.jobs_of(bench_scaling.arguments_of([*CPU, "--counts", "1,2,4"]), "gpt")
    sizes = {name: (len(job.devices), job.global_batch_size) for name, job in jobs.items()}
    assert sizes == {
        "1": (1, 4),
        "2, weak": (2, 8),
        "2, strong": (2, 4),
        "4, weak": (4, 16),
        "4, strong": (4, 4),
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--steps", "5"], "--steps must be a multiple of --log-every"),
        (["--ranks", "0"], "--ranks must be at least 1, but is 0"),
    ],
)
def test_wrong_options_are_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of([*CPU, *given])
    assert said in capsys.readouterr().err


def test_uneven_counts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_scaling.arguments_of([*CPU, "--counts", "1,3"])
    assert (
        "--local-batch must be a multiple of each of --counts, but is not of [3]" in capsys.readouterr().err
    )


def test_the_speed_is_the_median_of_the_lines_after_the_warm_steps() -> None:
    rows = [{"step": 2, "step_seconds": 9.0}, *({"step": s, "step_seconds": s / 10} for s in (4, 6, 8))]
    found = measured(rows, warm_steps=2, global_batch_size=12, tokens_per_sample=16)
    assert found["step_s"] == 0.6
    assert found["samples_per_s"] == pytest.approx(20.0)
    assert found["tokens_per_s"] == pytest.approx(320.0)


def test_a_figure_that_one_run_does_not_tell_has_no_median() -> None:
    assert median_of([{"a": 1.0}, {"a": 3.0}], "a") == 2.0
    assert median_of([{"a": [1, 5]}, {"a": [3, 2]}], "a") == 4
    assert median_of([{"a": 1.0}, {"a": None}], "a") is None
    assert median_of([{"a": [1, None]}], "a") is None


def test_lines_are_read_while_they_are_written(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert last_step(metrics) == 0
    whole = [
        {"step": 2, "step_seconds": 0.1},
        {"step": 2, "eval/loss": 3.0},
        {"step": 4, "step_seconds": 0.2},
    ]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in whole) + '{"step": 6, "step_sec')
    assert [row["step"] for row in rows_of(metrics)] == [2, 4]
    assert last_step(metrics) == 4


def test_utilisation_is_of_the_measured_steps_and_none_where_nobody_tells() -> None:
    watch = Watch(Path("metrics.jsonl"), [])
    watch._devices = [None, None]  # type: ignore[list-item]
    watch._samples = [(0, [0.1, None]), (10, [0.8, None]), (20, [1.0, None]), (30, [0.0, None])]
    assert watch.busy(10, 30) == [pytest.approx(0.9), None]

    class Rates:
        gpu = 93

    class Library:
        def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Rates:
            return Rates()

    assert utilisation(Card(Library(), object())) == 0.93
    assert utilisation(Card(object(), object())) is None


def run(speed: float, gib: float, **changes: Any) -> dict[str, Any]:
    found = {
        "samples_per_s": speed,
        "tokens_per_s": speed * 1024,
        "step_s": 64 / speed,
        "global_batch": 64,
        "peak_memory_bytes": [gib * 2**30, gib * 2**29],
        "utilisation": [0.97, None],
        "devices": ["card", "card"],
        "torch": "2.11.0",
    }
    return found | changes


FACTS = {
    "parameters": 124_475_904,
    "sample": "sequence 1,024",
    "local_batch": 32,
    "precision": "bfloat16",
    "warm_steps": 20,
    "steps": 100,
}


def test_table_of_both() -> None:
    runs = {"ours": [run(99.0, 21.0), run(101.0, 21.0)], "plain": [run(100.0, 20.0), run(100.0, 20.0)]}
    text = page.ddp({"facts": FACTS, "runs": runs})
    assert "2 × card; torch 2.11.0. 124,475,904 weights" in text
    figures = "100.0 | 99.0–101.0 | 102,400 | 640.06 | 1.000 | 21.00 | 1.050 | 97% / –"
    assert f"| `strategy=ddp` | {figures} |" in text


def test_table_of_scaling() -> None:
    one = [run(100.0, 20.0, utilisation=[0.99], global_batch=32)]
    plain = {"1": one, "2, weak": [run(200.0, 21.0)]}
    ours = {"1": one, "2, weak": [run(190.0, 21.0)]}
    text = page.scaling({"facts": FACTS, "runs": {"ours": ours, "plain": plain}})
    assert "| ours | 1 | 32 | 100.0 | 640.00 | 1.000 | 1.000 | 1.000 | 20.00 | 99% |" in text
    assert "| ours | 2, weak | 32 | 190.0 | 336.84 | 1.900 | 0.950 | 0.950 | 21.00 | 97% / – |" in text
    alone = page.scaling({"facts": FACTS, "runs": {"ours": ours}})
    assert "| ours | 2, weak | 32 | 190.0 | 336.84 | 1.900 | 0.950 | – | 21.00 | 97% / – |" in alone


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_scaling.arguments_of([*CPU, "--models", "gpt,resnet"])
    assert "--models: must be of gpt, convnet, but is resnet instead" in capsys.readouterr().err
