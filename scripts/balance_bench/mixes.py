"""The mixes of cards that the balancing benchmark runs on, and the catalogue that it gives hetexp for them.

The benchmark trains a model that this machine can really compute. Each mix divides its cards' rates by a
fixed number, and gives a pass the fixed cost of a model of more layers, so that a step of the small model
lasts as long beside the links as a large model's on the real cards. Links and memory stay the catalogue's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rivals.task import DATA, LEARNING_RATE, MODEL

from hetexp.hardware.catalogue import shipped

OVERHEAD_SECONDS = 1e-3
"""Fixed cost of a pass, and of an update, on every card: the catalogue's for a hundred times as many kernels.
Two cores need some 3 ms from the gradients of one step to the next forward pass: were an update shorter, the
time scale, and with it every run, would have to be longer."""


DEVIATION_SEED = 5
"""One for all mixes: with it the 165:61 mix can really gain about what its figures say, 1.37 times the faster
card, and the A380 is no help to the 4090."""


@dataclass(frozen=True)
class OwnCard:
    """A card of no maker: what a step's operations see of it is `effective_tflops`."""

    effective_tflops: float
    vendor: str


OWN_CARDS = {
    "three": OwnCard(30.0, "nvidia"),
    "one": OwnCard(10.0, "intel"),
    "card_165": OwnCard(165.0, "nvidia"),
    "card_61": OwnCard(61.0, "amd"),
    "ten": OwnCard(20.0, "nvidia"),
    "four": OwnCard(8.0, "amd"),
    "single": OwnCard(2.0, "intel"),
}
"""The rates are exact: `efficiency` is 1."""


@dataclass(frozen=True)
class Mix:
    """Devices, the work they share, and how long a step of it should really take."""

    title: str
    devices: tuple[str, ...]
    """Catalogue names, `@host` behind them where there are several hosts."""
    global_batch_size: int
    rate_divisor: float
    step_seconds: float
    """Real seconds of a step of the best split, at least: this machine's own overhead is small beside."""
    network: str = "ethernet_10g"

    @property
    def cards(self) -> tuple[str, ...]:
        return tuple(device.partition("@")[0] for device in self.devices)

    def overrides(self, folder: Path, alone: bool = False, task: Sequence[str] = ()) -> list[str]:
        """Return the configuration of a run.

        Args:
            folder: where the cards' figures are written.
            alone: whether the first device trains alone.
            task: model, data and optimizer; by default those of this benchmark.
        """
        entries = []
        for device in self.devices[:1] if alone else self.devices:
            card, _, host = device.partition("@")
            entries.append(f"{{device: 'emulated:{card}'" + (f", host: {host}" if host else "") + "}")
        return [
            *(task or TASK),
            f"trainer.global_batch_size={self.global_batch_size}",
            f"hardware.devices=[{','.join(entries)}]",
            f"hardware.catalogue={write_catalogue(folder, self)}",
            f"hardware.network={self.network}",
            f"hardware.deviation_seed={DEVIATION_SEED}",
        ]


MIXES = {
    "3:1": Mix("3:1", ("three", "one"), 256, 1000, 0.7),
    "165:61": Mix("165:61", ("card_165", "card_61"), 256, 5000, 0.7),
    "10:4:1": Mix("10:4:1", ("ten", "four", "single"), 256, 1000, 0.8),
    "8 mixed": Mix(
        "8 mixed cards",
        ("rtx_4090", "rtx_3090", "v100", "t4", "rx_7900_xtx", "rx_6600", "arc_a770", "arc_a380"),
        512,
        1500,
        1.6,
    ),
    "20:1": Mix(
        "RTX 4090 + Arc A380, 1 Gb/s between them",
        ("rtx_4090@desk", "arc_a380@shelf"),
        256,
        1000,
        0.5,
        "ethernet_1g",
    ),
}

TASK = [
    "model=gpt",
    *(f"model.{key}={value}" for key, value in MODEL.items()),
    "data=synthetic",
    *(f"data.{key}={value}" for key, value in DATA.items()),
    f"optimizer.lr={LEARNING_RATE}",
    "optimizer.fused=true",
    "trainer.max_epochs=null",
    "hardware.threads_per_rank=1",
    "launch.start_method=forkserver",
    "logger=none",
]


def write_catalogue(folder: Path, mix: Mix) -> Path:
    """Write the YAML file for `hardware.catalogue`: the mix's cards with their rates divided."""
    cards = {}
    for name in dict.fromkeys(mix.cards):
        if name in OWN_CARDS:
            own = OWN_CARDS[name]
            rate = own.effective_tflops / mix.rate_divisor
            cards[name] = {
                "name": f"{own.effective_tflops:g} TFLOP/s",
                "vendor": own.vendor,
                "memory_gib": 16,
                "tflops": {"float32": rate, "float64": rate},
                "efficiency": 1.0,
                "bandwidth_gb_per_second": 500,
                "link": "pcie4x16",
                "overhead_seconds": OVERHEAD_SECONDS,
            }
        else:
            rates = shipped().card(name).tflops
            divided = {key: rate / mix.rate_divisor for key, rate in rates.items()}
            cards[name] = {"tflops": divided, "overhead_seconds": OVERHEAD_SECONDS}
    path = folder / "cards.yaml"
    path.write_text(yaml.safe_dump({"cards": cards}, sort_keys=False), encoding="utf-8")
    return path
