"""Real runs for tests: the launcher in this process, ranks forked from a server that has imported torch."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from hetexp.app import check, compose_config, run
from hetexp.commands.launch import make, parse
from hetexp.core.config import read_config
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.hardware.selection.pool import Selection
from hetexp.launch.launcher import launch
from hetexp.plan.run_spec import CheckedRun, Request, RunSpec


@dataclass
class Run:
    """What a run left behind."""

    folder: Path
    summary: dict[str, Any]
    screen: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [row["train/loss"] for row in self.metrics if "train/loss" in row]

    def parameters(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """The model's tensors at a step, by default the last one saved."""
        folders = sorted((self.folder / "checkpoints").iterdir())
        chosen = (
            folders[-1] if step is None else next(f for f in folders if int(f.name.split("_")[1]) == step)
        )
        return load_file(chosen / "model.safetensors")


def unbuilt_config(**sections: Any) -> dict[str, Any]:
    """Return a whole configuration whose components are never built, with sections laid over it."""
    part = {"_target_": "unused"}
    raw: dict[str, Any] = {
        "hardware": {"devices": ["cpu"]},
        "strategy": {"_target_": "hetexp.strategy.ddp.DDP"},
        "balancing": {"_target_": "hetexp.balancing.equal.Equal"},
        "model": part,
        "data": part,
        "optimizer": part,
        "logger": part,
        "trainer": {"global_batch_size": 8, "max_steps": 1},
    }
    for name, section in sections.items():
        raw[name] = {**raw[name], **section} if name in ("trainer", "hardware") else section
    return raw


def plan_on(devices: Sequence[DeviceSpec], config: dict[str, Any], **changes: Any) -> Plan:
    """Return a plan of these devices with equal shares of the global batch, and what is changed."""
    count, total = len(devices), config["trainer"]["global_batch_size"]
    plan = Plan(
        run_id="run",
        run_dir="/tmp/run",
        name="run",
        group=None,
        config=config,
        devices=tuple(devices),
        strategy="ddp",
        shares=(1 / count,) * count,
        local_batch_sizes=(total // count,) * count,
        collective_backend="nccl",
        threads=(1,) * count,
        precisions=("float32",) * count,
    )
    return replace(plan, **changes)


def spec_on(devices: Sequence[DeviceSpec], config: dict[str, Any], **request: Any) -> RunSpec:
    """Return a run of a configuration on these devices."""
    place = {"run_dir": Path("/tmp/run"), "working_dir": Path.cwd(), **request}
    return RunSpec(read_config(config), config, Selection(list(devices)), Request(**place))


def checked(*words: str, run_dir: Path = Path("/tmp/run"), **request: Any) -> CheckedRun:
    """Return what `train.py` finds of what was typed."""
    return check(compose_config(words), Request(run_dir, Path.cwd(), **request))


Train = Callable[..., Run]


def start_run(run_dir: Path, overrides: tuple[str, ...]) -> Run:
    """Run `train.py` with these overrides in this process; ranks are forked, threads and trackers off.

    Shares are equal, nothing is measured first, a lost rank ends the run, and digits and the network for
    them are small, unless the overrides say otherwise.
    """
    screen = io.StringIO()
    quick = [
        "launch.start_method=forkserver",
        "hardware.threads_per_rank=1",
        "logger=none",
        "diagram=false",
        "monitor=none",
    ]
    quick += _unless(overrides) + _small(overrides)
    cfg = compose_config([*quick, *overrides])
    console = Console(file=screen, width=160)
    try:
        summary = run(cfg, Request(run_dir, Path.cwd(), overrides=overrides), console)
    except Exception as error:
        error.screen = screen.getvalue()  # type: ignore[attr-defined]
        raise
    return Run(run_dir, summary, screen.getvalue())


def _unless(overrides: Sequence[str]) -> list[str]:
    """Return what a test's run has that does not say otherwise."""
    options = ["balancing=equal", "fault.survive=false"]
    groups = [option.partition("=")[0] for option in options]
    given = [text.partition("=")[0] for text in overrides]
    return [option for option, group in zip(options, groups, strict=True) if group not in given]


def _small(overrides: Sequence[str]) -> list[str]:
    """Return what makes digits and the network for them small, unless the overrides choose others."""
    given, chosen = [text.partition("=")[0] for text in overrides], []
    if not {"data", "data.size", "experiment"} & set(given):
        chosen.append("data.size=8")
    if not {"model", "experiment"} & set(given):
        small = {"model.widths": "[32,64]", "model.blocks_per_width": "1", "model.groups": "8"}
        chosen += [f"{key}={value}" for key, value in small.items() if key not in given]
    return chosen


def start_script(run_dir: Path, script: Path, overrides: tuple[str, ...], *arguments: str) -> Run:
    """Run `hetexp launch` of a script as `start_run` runs `train.py`."""
    quick = [
        "launch.start_method=forkserver",
        "hardware.threads_per_rank=1",
        "logger=none",
        "diagram=false",
        "monitor=none",
    ]
    quick += _unless(overrides)
    words = [str(script), *quick, *overrides, f"hydra.run.dir={run_dir}", "--", *arguments]
    screen = io.StringIO()
    try:
        summary = launch(*make(*parse(words)), Console(file=screen, width=160))
    except Exception as error:
        error.screen = screen.getvalue()  # type: ignore[attr-defined]
        raise
    return Run(run_dir, summary, screen.getvalue())


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return ‖Δθ‖₂ / ‖θ‖₂ over all parameters."""
    assert a.keys() == b.keys()
    delta = sum(float((a[k].double() - b[k].double()).pow(2).sum()) for k in a)
    size = sum(float(b[k].double().pow(2).sum()) for k in b)
    return float((delta / size) ** 0.5)


def worst(one: Run, reference: Run, steps: int) -> tuple[float, float]:
    """Return the largest relative difference of the loss and of the parameters over all steps.

    Both runs log every step and save a checkpoint at each.
    """
    assert len(one.losses) == len(reference.losses) == steps
    loss = max(abs(a - b) / abs(b) for a, b in zip(one.losses, reference.losses, strict=True))
    numbers = range(1, steps + 1)
    return loss, max(difference(one.parameters(k), reference.parameters(k)) for k in numbers)
