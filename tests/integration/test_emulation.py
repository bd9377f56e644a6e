"""Whole runs on emulated cards: the arithmetic is untouched, the times are those that paper says."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from support import Run, Train, difference

from hetexp.core.device import GIB
from hetexp.core.errors import ConfigError, RunFailedError
from hetexp.hardware.catalogue import Card, card
from hetexp.hardware.emulation.memory_model import CONTEXT_BYTES
from hetexp.hardware.links import SHARED_EXCHANGE

TINY = (
    "model=mlp",
    "model.hidden_sizes=[16]",
    "data=synthetic",
    "data.num_test_samples=16",
    "trainer.log_every=1",
    "trainer.max_epochs=null",
)
CARDS = """
links:
  short: {gb_per_second: 10, efficiency: 1.0, latency_seconds: 1.0e-5}
cards:
  one_megaflops: &slow
    name: One Megaflops
    vendor: nvidia
    memory_gib: 1
    tflops: {float32: 1.0e-6}
    efficiency: 1.0
    bandwidth_gb_per_second: 10
    link: short
  two_megaflops: {<<: *slow, name: Two Megaflops, tflops: {float32: 2.0e-6}}
  small: {<<: *slow, name: Small, tflops: {float32: 1.0}, memory_gib: MEMORY}
"""
"""So slow that this machine's own work is nothing beside the modelled one."""
FORWARD, BACKWARD = 2 * (16 * 16 + 16 * 4), 2 * 16 * 16 + 2 * (2 * 16 * 4)
"""Operations a sample of the tiny model."""


@pytest.fixture
def own_cards(tmp_path: Path) -> str:
    """A person's own catalogue; its `small` card has room for 4 MiB beside the context."""
    path = tmp_path / "cards.yaml"
    path.write_text(CARDS.replace("MEMORY", str((CONTEXT_BYTES + 4 * 2**20) / GIB)))
    return f"hardware.catalogue={path}"


def devices(*names: str) -> str:
    return "hardware.devices=[" + ",".join(names) + "]"


def weights(*values: float) -> tuple[str, str]:
    return "balancing=manual", f"balancing.weights=[{','.join(map(str, values))}]"


def emulation(run: Run) -> dict[str, Any]:
    written: dict[str, Any] = json.loads((run.folder / "emulation.json").read_text())
    return written


def speeds(run: Run, device: str) -> list[float]:
    key = f"device/{device}/samples_per_second"
    return [row[key] for row in run.metrics if key in row]


class Failed:
    """What a failed run left behind."""

    def __init__(self, train: Train, folder: Path, *overrides: str) -> None:
        with pytest.raises(RunFailedError) as caught:
            train(*TINY, *overrides, folder=folder)
        self.screen: str = caught.value.screen  # type: ignore[attr-defined]
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        self.by_device = {failure["device"]: failure for failure in self.summary["failures"]}
        assert self.summary["status"] == "failed"


# ---------------------------------------------------------------- the arithmetic is untouched


@pytest.mark.parametrize(
    ("reference", "emulated", "options", "tolerance"),
    [
        # The scale is found by a rehearsal, which leaves weights, moments and random numbers as they were.
        (
            ["cpu"] * 2,
            ["emulated:rtx_3090", "emulated:arc_a770"],
            (*weights(24, 8), "trainer.global_batch_size=32", "model.dropout=0.3"),
            0.0,
        ),
        # The mean over three ranks is taken by another kernel than DDP's own.
        (
            ["cpu"] * 3,
            ["emulated:rtx_3090", "emulated:rtx_4090", "emulated:t4"],
            (*weights(0, 3, 1), "hardware.time_scale=100"),
            1e-6,
        ),
        (
            ["cpu"] * 2,
            ["emulated:rtx_3090", "emulated:rx_6600"],
            (*weights(3, 1), "trainer.microbatch_size=7", "trainer.clip_norm=0.5", "hardware.time_scale=100"),
            0.0,
        ),
    ],
    ids=["rehearsed", "a share of zero", "accumulation"],
)
def test_emulated_cards_learn_the_same(
    train: Train, reference: list[str], emulated: list[str], options: tuple[str, ...], tolerance: float
) -> None:
    real, paced = (
        train(*TINY, "trainer.max_steps=6", "optimizer.lr=0.05", *options, devices(*names))
        for names in (reference, emulated)
    )
    assert paced.summary["time_scale"] > 0
    assert len(real.losses) == 6 and real.losses[-1] < real.losses[0]
    assert paced.losses == pytest.approx(real.losses, rel=tolerance, abs=0.0)
    assert difference(paced.parameters(), real.parameters()) <= tolerance
    assert paced.summary["final"]["eval"] == pytest.approx(real.summary["final"]["eval"], rel=1e-6)


# ---------------------------------------------------------------- the times are those on paper

SIZES = (16, 256, 256, 4)
SAMPLES = (40, 24)
STEPS = 12
WAYS = {("rx_7900_xtx", "arc_a770"): "comm=gloo", ("m2_max", "rtx_4090"): "comm.wire=int8"}
"""Mixes that exchange otherwise than the devices alone would have it."""


class OnPaper:
    """One card's part of a step of the MLP, from the figures of its data sheet."""

    def __init__(self, card: Card, efficiency: float, samples: int) -> None:
        rate = card.tflops["float32"] * 1e12 * efficiency
        layers = [2 * a * b for a, b in itertools.pairwise(SIZES)]
        forward, backward = sum(layers), layers[0] + 2 * sum(layers[1:])
        link = card.host_link
        self.latency, self.bytes_per_second = link.latency_seconds, link.gb_per_second * 1e9 * link.efficiency
        inputs = samples * SIZES[0] * 4
        self.bucket = 4 * sum(a * b + b for a, b in itertools.pairwise(SIZES))
        """All weights and biases in float32: less than 25 MB, so one bucket, gone when backward is over."""
        self.own = (
            card.overhead_seconds  # update: seven times the weights through the card's memory
            + 7 * self.bucket / (card.bandwidth_gb_per_second * 1e9)
            + (self.latency + inputs / self.bytes_per_second)
            + (card.overhead_seconds + samples * forward / rate)
            + (card.overhead_seconds + samples * backward / rate)
        )


def step_on_paper(one: OnPaper, other: OnPaper, one_vendor: bool, comm: str) -> float:
    """A ring of two moves every byte once, in two rounds; so does memory, whose rate is that of two ranks.

    Both ranks wait for the same sum. Where it goes through the host, each is back there after its way down,
    its own work and its way up: the longer of these round trips and the sum make up a step. int8 leaves a
    byte of a number and a scale of 256 numbers, and brings the other rank's.
    """
    if one_vendor:
        slowest = min(one.bytes_per_second, other.bytes_per_second)
        return max(one.own, other.own) + 2 * max(one.latency, other.latency) + one.bucket / slowest
    wire = 260 / 1024 if "int8" in comm else 1.0
    gloo, shared = 2 * 1e-4 + wire * one.bucket / 1.7e9, SHARED_EXCHANGE.seconds(wire * one.bucket)
    trips = [
        card.own + 2 * (card.latency + wire * card.bucket / card.bytes_per_second) for card in (one, other)
    ]
    return max(trips) + (gloo if comm == "comm=gloo" else shared)


@pytest.mark.parametrize(
    ("names", "efficiency"),
    [
        # Two cards of each mix; with a low efficiency the passes take several times their fixed cost.
        (("rtx_3090", "arc_a770"), 0.005),  # nvidia_arc, nvidia_amd_arc
        (("rtx_3090", "arc_a770"), None),
        (("rtx_3090", "rx_7900_xtx"), 0.005),  # nvidia_amd
        (("rx_7900_xtx", "arc_a770"), None),  # amd_arc
        (("rx_7900_xtx", "rx_7900_xtx"), 0.005),  # amd
        (("arc_a770", "arc_a770"), None),  # arc
        (("a100", "v100"), 0.002),  # a100_v100
        (("m2_max", "rtx_4090"), 0.005),  # mac_nvidia
        (("rtx_4090", "arc_a380"), 0.005),  # eight_mixed
        (("desktop_cpu_16", "desktop_cpu_16"), None),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_step_takes_what_paper_says(train: Train, names: tuple[str, str], efficiency: float | None) -> None:
    cards = [card(name) for name in names]
    parts = [
        OnPaper(one, efficiency or one.efficiency, samples)
        for one, samples in zip(cards, SAMPLES, strict=True)
    ]
    one_vendor = cards[0].vendor == cards[1].vendor != "cpu"
    comm = WAYS.get(names, "comm=auto")
    expected = step_on_paper(parts[0], parts[1], one_vendor, comm)
    scale = 0.06 / expected
    chosen = f", efficiency: {efficiency}" if efficiency else ""
    run = train(
        *TINY,
        comm,
        "strategy.bucket_cap_mb=25",
        f"model.hidden_sizes={list(SIZES[1:-1])}",
        "trainer.global_batch_size=64",
        f"trainer.max_steps={STEPS}",
        "trainer.log_every=100",
        *weights(*SAMPLES),
        devices(*(f"{{device: 'emulated:{name}'{chosen}}}" for name in names)),
        f"hardware.time_scale={scale!r}",
    )
    summary, written = run.summary, emulation(run)
    assert summary["emulated"] is True and summary["link_emulated"] is True
    assert summary["time_scale"] == written["time_scale"] == scale
    assert [num_bytes for _, num_bytes in written["buckets"]] == [parts[0].bucket]
    assert written["buckets"][0][0] == pytest.approx(1.0)
    assert summary["predicted_step_s"] / scale == pytest.approx(expected, rel=0.01)
    assert summary["measured_step_s"] >= 0.97 * summary["predicted_step_s"]
    if summary["valid"]:  # by the run's own account no phase was late, but for what a busy host does between
        assert summary["measured_step_s"] <= 1.25 * summary["predicted_step_s"]
    for device, part in zip(written["devices"], parts, strict=True):
        assert device["phases"].keys() == {"forward", "backward", "update", "exchange"}
        # What the pace asks for is what paper says, no less and no more.
        asked = sum(device["phases"][name]["modelled"] for name in ("forward", "backward", "update"))
        assert asked / scale == pytest.approx(part.own, rel=0.01)
        for name, phase in device["phases"].items():
            assert phase["ratio"] >= 0.99, f"{device['id']}: {name} was quicker than its pace"


def test_a_prediction_needs_no_samples_on_rank_0(train: Train) -> None:
    """When the buckets left is told by a rank that computes."""
    run = train(
        *TINY,
        "model.hidden_sizes=[256,256]",
        "trainer.max_steps=4",
        "strategy.bucket_cap_mb=0.001",
        *weights(0, 1, 1),
        devices(*["emulated:rtx_3090"] * 3),
        "hardware.time_scale=200",
    )
    fractions = [fraction for fraction, _ in emulation(run)["buckets"]]
    assert len(fractions) > 1
    assert fractions == sorted(fractions)
    # The last layer is 1.5 % of the work, its gradients need not wait for the others.
    assert fractions[0] < 0.1
    assert fractions[-1] == pytest.approx(1.0)


def test_an_outrun_pace_makes_the_run_invalid(train: Train) -> None:
    cards = devices("emulated:rtx_3090", "emulated:arc_a770")
    run = train(*TINY, "trainer.max_steps=3", cards, "hardware.time_scale=1e-6")
    assert run.summary["status"] == "completed"
    assert run.summary["valid"] is False
    assert "`hardware.time_scale`" in run.summary["invalid_reason"]
    assert "emulated:0 (RTX 3090 (emulated))" in run.summary["invalid_reason"]
    assert "NOT VALID" in run.screen
    assert "hardware.time_scale" in run.screen


# ---------------------------------------------------------------- faults on order


def test_out_of_memory_on_order(train: Train) -> None:
    common = (
        *TINY,
        devices("emulated:rtx_3090", "emulated:arc_a770"),
        "hardware.time_scale=50",
        "trainer.max_steps=5",
    )
    run = train(*common, "fault.events=[{kind: oom, device: 'emulated:1', at_step: 3}]")
    assert difference(run.parameters(), train(*common).parameters()) <= 1e-6
    told = [row.get("device/emulated:1/microbatch_size") for row in run.metrics if "train/loss" in row]
    samples = json.loads((run.folder / "plan.json").read_text())["local_batch_sizes"][1]
    assert told == [None, None, None, -(-samples // 2), -(-samples // 2)]
    assert run.summary["devices"][1]["micro_batch"] == -(-samples // 2)
    screen = " ".join(run.screen.split())
    assert "Rank 1, emulated:1 (Arc A770 (emulated)), ran out of memory in step 4" in screen


def test_death_on_order(train: Train, tmp_path: Path) -> None:
    failed = Failed(
        train,
        tmp_path / "run",
        devices("emulated:rtx_3090", "emulated:arc_a770"),
        "hardware.time_scale=50",
        "trainer.max_steps=9",
        "fault.events=[{kind: death, device: 'emulated:0', at_step: 3}]",
    )
    assert "killed by SIGKILL" in failed.summary["error"]
    assert "emulated:0 (RTX 3090 (emulated))" in failed.summary["error"]
    assert "killed by SIGKILL" in failed.screen
    assert failed.by_device["emulated:0"]["kind"] == "SIGKILL"
    assert "Followed by: rank 1 (lost a peer)." in failed.screen


def test_slow_hot_and_silent_devices(train: Train, own_cards: str) -> None:
    """Passes of 32 samples are modelled as 41 and 49 ms: whatever the machine does beside is small.

    A busy moment makes a device slower, never quicker: of a few steps alike the quickest is the modelled one.
    """
    events = (
        "{kind: slow, device: 'emulated:0', at_step: 5, factor: 3}",
        "{kind: thermal, device: 'emulated:1', at_step: 2, factor: 4, warm_up: 2}",
        "{kind: stall, device: 'emulated:1', at_step: 3, seconds: 1}",
    )
    run = train(
        *TINY,
        own_cards,
        devices("emulated:one_megaflops", "emulated:one_megaflops"),
        "hardware.time_scale=2",
        "trainer.max_steps=11",
        f"fault.events=[{','.join(events)}]",
    )
    assert run.summary["status"] == "completed"
    slow, hot = speeds(run, "emulated:0"), speeds(run, "emulated:1")
    known = 1e6 / (FORWARD + BACKWARD) / 2
    assert max(slow[:5]) / max(slow[5:]) == pytest.approx(3.0, rel=0.15)
    assert max(slow[:5]) <= 1.03 * known and max(slow[5:]) <= 1.03 * known / 3  # a pace is never undercut
    # Heat: k steps after its beginning 1 + 3 (1 − exp(−k / 2)) times slower, that is never quicker.
    heat = [1 + 3 * (1 - math.exp(-max(0, step - 2) / 2)) for step in range(11)]
    assert all(speed <= 1.03 * known / factor for speed, factor in zip(hot, heat, strict=True))
    assert max(hot[:3]) / max(hot[-3:]) == pytest.approx(heat[-3], rel=0.15)
    stalled = [row["step_seconds"] for row in run.metrics if row.get("step") == 4 and "step_seconds" in row]
    assert len(stalled) == 1 and stalled[0] >= 1.0


# ---------------------------------------------------------------- memory

LARGE = (
    "model.hidden_sizes=[256,256]",
    "data.num_samples=8192",
    "trainer.global_batch_size=4096",
    "trainer.max_steps=2",
    "hardware.time_scale=1",
)
"""1.1 MiB of weights, gradients and moments; 2048 samples a rank keep 2 · 256 numbers each, 4 MiB."""


def test_a_batch_that_does_not_fit_is_taken_in_passes_that_do(train: Train, own_cards: str) -> None:
    run = train(*TINY, *LARGE, own_cards, devices("emulated:rtx_3090", "emulated:small"))
    plan = json.loads((run.folder / "plan.json").read_text())
    whole, most = plan["microbatch_sizes"]
    assert whole is None
    assert 256 <= most < 2048  # 256 fit, as below
    assert any(f"2048 samples of a step in passes of at most {most}" in why for why in plan["reasons"])
    small = run.summary["devices"][1]
    assert small["micro_batch"] <= most
    assert small["peak_memory"] <= plan["devices"][1]["memory_bytes"]
    assert "ran out of memory" not in (run.folder / "logs" / "rank_0.log").read_text()


def test_a_chosen_microbatch_that_does_not_fit_is_refused_with_the_one_that_does(
    train: Train, own_cards: str
) -> None:
    cards = devices("emulated:rtx_3090", "emulated:small")
    with pytest.raises(ConfigError) as refused:
        train(*TINY, *LARGE, own_cards, cards, "trainer.microbatch_size=2048")
    (problem,) = refused.value.problems
    assert "emulated:1 (Small (emulated))" in problem
    advised = re.search(r"trainer\.microbatch_size=(\d+)", problem)
    assert advised is not None
    run = train(*TINY, *LARGE, own_cards, cards, advised[0])
    assert run.summary["status"] == "completed"
    assert (
        run.summary["devices"][1]["peak_memory"]
        <= json.loads((run.folder / "plan.json").read_text())["devices"][1]["memory_bytes"]
    )


def test_a_batch_that_does_not_fit_is_halved_until_it_does(train: Train, own_cards: str) -> None:
    cards = devices("emulated:rtx_3090", "emulated:small")
    run = train(*TINY, *LARGE, own_cards, cards, "hardware.check_memory=false")
    small = run.summary["devices"][1]
    plan = json.loads((run.folder / "plan.json").read_text())
    assert small["peak_memory"] <= plan["devices"][1]["memory_bytes"]
    assert small["micro_batch"] * 2 >= 256  # 256 fit, as below
    assert "ran out of memory in step 1, with its share of 2048 samples" in " ".join(run.screen.split())


def test_smaller_microbatches_fit(train: Train, own_cards: str) -> None:
    cards = devices("emulated:rtx_3090", "emulated:small")
    run = train(*TINY, *LARGE, own_cards, cards, "trainer.microbatch_size=256")
    assert run.summary["status"] == "completed"
    weights = 4 * sum(a * b + b for a, b in itertools.pairwise(SIZES))
    for device in run.summary["devices"]:
        # Four times the weights, AdamW's counters, and of 256 samples the inputs and two layers' results.
        expected = CONTEXT_BYTES + 4 * weights + 6 * 4 + 4 * 256 * (16 + 256 + 256)
        assert device["peak_memory"] == expected
        assert device["peak_memory"] < CONTEXT_BYTES + 4 * 2**20


# ---------------------------------------------------------------- what only measuring finds out


def test_hidden_deviations(train: Train, own_cards: str) -> None:
    options = (
        *TINY,
        own_cards,
        devices("emulated:one_megaflops", "emulated:two_megaflops"),
        "hardware.time_scale=3",
        "trainer.max_steps=6",
        "hardware.deviation_seed=5",
    )
    runs = [train(*options) for _ in range(2)]
    for run in runs:
        plan = json.loads((run.folder / "plan.json").read_text())
        assert plan["config"]["hardware"]["deviation_seed"] == 5
        assert [device["card_facts"]["tflops"] for device in plan["devices"]] == [
            {"float32": 1e-6},
            {"float32": 2e-6},
        ]
        assert not {key for device in plan["devices"] for key in device} & {"deviation", "factor"}
    # The same steps jitter alike, and a busy moment only makes them slower: the quickest ones compare.
    measured = [[max(speeds(run, device)) for device in ("emulated:0", "emulated:1")] for run in runs]
    slow, quick = measured[0]
    # Neither is what its figures say, nor is the one twice as quick as the other.
    known = 1e6 / (FORWARD + BACKWARD) / 3
    assert slow != pytest.approx(known, rel=0.08)
    assert quick != pytest.approx(2 * known, rel=0.08)
    assert quick / slow != pytest.approx(2.0, rel=0.08)
    assert measured[1] == pytest.approx(measured[0], rel=0.05)
    # The prediction is made from the figures: 32 samples on each card, the slower one decides.
    step = 3 * 32 * (FORWARD + BACKWARD) / 1e6
    assert runs[0].summary["predicted_step_s"] == pytest.approx(step, rel=0.01)
    assert runs[0].summary["predicted_step_s"] == runs[1].summary["predicted_step_s"]
