"""The pure parts of `benchmarks/bench_exposed.py`: who starts, and what the tables say."""

from __future__ import annotations

from typing import Any

import pytest
from bench_exposed import arguments_of, ranks_of, size_of
from ddp_bench.task import TINY
from exposed_bench import runs as exposed
from exposed_bench.runs import WITHOUT, Ranks
from support import checked

CPU = ["--part", "mix,pair,wires", "--device", "cpu", "--tiny"]


def test_every_run_may_start() -> None:
    arguments = arguments_of(CPU)
    ranks = ranks_of("mix", arguments)
    assert ranks.split == (7, 1)
    for words in (
        exposed.timed(ranks, size_of("mix", arguments), WITHOUT, 4, "float32"),
        exposed.timed(ranks, size_of("mix", arguments), "gloo", 4, "float32"),
        exposed.trained(ranks, size_of("wires", arguments), "gloo", "float32", 4, "float32"),
    ):
        assert checked(*words).problems == []


def test_all_models_have_more_than_100_million_weights() -> None:
    arguments = arguments_of(["--part", "mix"])
    assert all(size_of(part, arguments).num_parameters() > 1e8 for part in ("mix", "pair"))
    text = exposed.with_characters(TINY, 2)
    assert text.num_layers == 2
    wires = size_of("wires", arguments)  # its vocabulary is the text's, some dozen characters
    assert wires.num_parameters() - wires.vocab_size * wires.embedding_size > 1e8


def test_a_card_that_is_named_twice_is_shared() -> None:
    assert "hardware.devices=[cuda:0,cuda:1]" in Ranks(("cuda:0", "cuda:1"), (8, 8)).words()
    shared = Ranks(("cuda:1", "cuda:1"), (8, 8)).words()
    assert shared[:2] == ["hardware.gpu_ids=[1,1]", "hardware.share_devices=true"]
    assert "hardware.devices=[cpu,cpu]" in Ranks(("cpu", "cpu"), (8, 8)).words()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--part", "mixed"], "--part: must be of mix, pair, wires, but is mixed instead"),
        (["--part", "mix", "--backends", "tcp"], "--backends: must be of gloo, shm, native, auto"),
        (["--part", "wires", "--wires", "int8"], "--wires must begin with float32"),
        (["--part", "pair", "--cards", "0"], "--cards must be two numbers"),
    ],
)
def test_wrong_options_are_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of(given)
    assert said in capsys.readouterr().err


def run(step: float, told: float, losses: list[float]) -> dict[str, Any]:
    return {
        "step_s": step,
        "losses": losses,
        "comm": {"exposed_s": told, "bytes_per_step": 4e8},
        "devices": ["card", "cpu"],
        "torch": "2.11.0",
    }


FACTS = {
    "parameters": 124_475_904,
    "sequence_length": 128,
    "split": (7, 1),
    "precision": "float32",
    "warm_steps": 4,
    "steps": 16,
    "backend": "shm",
}


def test_what_an_exchange_costs_a_step() -> None:
    runs = {
        WITHOUT: [run(0.5, 0.0, [9.0, 9.0])],
        "gloo": [run(0.9, 0.42, [9.0, 8.0]), run(0.9, 0.42, [9.0, 8.0])],
        "shm": [run(0.6, 0.1, [9.0, 8.0]), run(0.6, 0.12, [9.0, 8.25])],
    }
    found = exposed.exposed(runs)
    assert found["gloo"]["beyond_s"] == pytest.approx(0.4)
    assert found["gloo"]["loss_differs"] == 0.0
    assert found["shm"]["exposed_s"] == pytest.approx(0.11)
    assert found["shm"]["loss_differs"] == 0.25
    text = exposed.timed_table({"runs": runs, "facts": FACTS})
    assert "| left out | 500.0 | – |" in text
    assert "| `gloo` | 900.0 | 400.0 | 1.000 | 420.0 | 1.000 | 0 |" in text
    assert "| `shm` | 600.0 | 100.0 | 0.250 | 110.0 | 0.262 | 2.5e-01 |" in text


def test_curves_of_another_length_are_no_curves_of_the_same_run() -> None:
    with pytest.raises(ValueError, match="zip"):
        exposed.largest_difference([[1.0, 2.0], [1.0]])


def test_what_a_wire_costs_in_loss_and_saves_in_bytes() -> None:
    coded = run(0.2, 0.0, []) | {"eval_loss": 2.003, "comm": {"bytes_per_step": 1e8}}
    runs = {"float32": run(0.3, 0.0, []) | {"eval_loss": 2.0}, "int8": coded}
    text = exposed.wires_table({"runs": runs, "facts": FACTS})
    assert "| `float32` | 2.0000 |  | 400,000,000 | 1.00 | 300.0 |" in text
    assert "| `int8` | 2.0030 | +0.15% | 100,000,000 | 4.00 | 200.0 |" in text
