"""`hetexp merge`: one model of several runs, or of the independently trained devices of a run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.commands.support.command_line import add_shared, command_parser, exit_code

if TYPE_CHECKING:
    from hetexp.checkpoint.merge import Parent
    from hetexp.strategy.independent.merging import TrainingData
    from hetexp.training.state import TrainState

_NO_STEPS = {"schedule": "constant", "schedule_every": None, "warmup_steps": 0, "fast_dev_run": 0}
"""No step is taken, and a class of `trainer.schedule` may be a stranger's."""
_EPILOG = """\
examples
  hetexp merge outputs/2026-01-31/12-00-00-0a1b2c            the devices of a run of strategy=independent
  hetexp merge RUN RUN RUN --soup greedy --output soup        several runs of one configuration
  hetexp merge RUN RUN --weights 0.7 0.3"""


def main(arguments: Sequence[str]) -> int:
    """Merge checkpoints, and print the result beside its parents; return 2 if that is impossible."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _run(options), trust=options.trust)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "merge",
        "Merge checkpoints of one model into one: the mean of their weights, by the samples that "
        "each was trained on. The result is evaluated beside its parents, and any strategy resumes from it.",
        _EPILOG,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="run or checkpoint folder")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder for checkpoints/step_…; by default the run itself if it is a single one, else "
        "merged in the first one",
    )
    parser.add_argument("--weights", nargs="+", type=float, metavar="W", help="one for each checkpoint")
    parser.add_argument(
        "--soup",
        choices=["greedy"],
        help="add models from the best to the worst, each only if the loss of the mean does not rise",
    )
    parser.add_argument(
        "--batch-norm",
        choices=["recalibrate", "average"],
        default="recalibrate",
        help="running statistics: measured again with training data (the default), or averaged",
    )
    parser.add_argument(
        "--lora-scaling",
        type=float,
        metavar="S",
        help="factor of the adapters' products (alpha / rank), if the model's layers do not define it",
    )
    parser.add_argument("--force", action="store_true", help="merge models that began from different weights")
    add_shared(parser, "--trust", "--trust-owner")
    return parser


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from hetexp.core.errors import ConfigError, must_be
    from hetexp.core.files import check_owner
    from hetexp.launch.terminal.display import show_merge
    from hetexp.strategy.independent.merging import MergeOptions, merge, write_merged

    folder = _output(options.output, options.runs)
    check_owner(folder, options.trust_owner, "--output", "--trust-owner {}")
    parents = _parents(options.runs)
    if len(parents) < 2:
        raise ConfigError(must_be("RUN", "at least two checkpoints", str(parents[0].folder)))
    if options.lora_scaling is not None and not 0 < options.lora_scaling < float("inf"):
        raise ConfigError(must_be("--lora-scaling", "a number above 0", options.lora_scaling))
    console = Console()
    state, reason = _cpu_state(parents[0])
    if state is None:
        console.print(f"Nothing is evaluated: {reason}", style="yellow", markup=False, highlight=False)
    elif state.eval_data is None:
        console.print("Nothing is evaluated: the runs have no evaluation data.", style="yellow")
    data, unbuilt = _training_data(parents, state)
    averages = unbuilt is not None and options.batch_norm == "recalibrate"
    if averages:
        text = f"BatchNorm's running statistics, if there are any, are averaged: {unbuilt}"
        console.print(text, style="yellow", markup=False, highlight=False)
    settings = MergeOptions(
        weights=tuple(options.weights) if options.weights is not None else None,
        soup=options.soup,
        batch_norm="average" if averages else options.batch_norm,
        lora_scaling=options.lora_scaling,
        force=options.force,
    )
    merged = merge(parents, settings, state, data=data)
    path = write_merged(folder, parents, merged)
    show_merge(merged.report, console)
    if merged.report["other_start"] is not None:
        console.print(merged.report["other_start"], style="yellow", markup=False, highlight=False)
    console.print(f"Merged checkpoint: {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _parents(runs: Sequence[Path]) -> list[Parent]:
    """Return the newest checkpoint of each run, and of every device if its devices trained independently."""
    from hetexp.checkpoint.manifest import MANIFEST, find_checkpoint, rank_folders, search_rank_checkpoints
    from hetexp.checkpoint.merge import read_parent

    folders: list[Path] = []
    for run in runs:
        independent = not (run / MANIFEST).is_file() and bool(rank_folders(run))
        folders += search_rank_checkpoints(run) if independent else [find_checkpoint(run)]
    parents = [read_parent(folder) for folder in folders]
    # A device without a share has trained nothing.
    return [parent for parent in parents if parent.samples] or parents


def _output(output: Path | None, runs: Sequence[Path]) -> Path:
    if output is not None:
        return output / "checkpoints"
    first: Path = runs[0]
    if len(runs) == 1 and (first / "checkpoints").is_dir():
        return first / "checkpoints"
    return first / "merged" / "checkpoints"


def _training_data(
    parents: Sequence[Parent], state: TrainState | None
) -> tuple[list[TrainingData], str | None]:
    """Return each parent's training data; none with the reason if they cannot be built.

    Args:
        state: of the first parent; `None`: nothing is measured.
    """
    from hetexp.core.errors import ConfigError
    from hetexp.core.instantiate import untrusted
    from hetexp.data.base import build_data, indexed
    from hetexp.data.sampler import GlobalSampler
    from hetexp.strategy.independent.merging import RECALIBRATED_SAMPLES, TrainingData, first_epoch
    from hetexp.training.seeding import seeded

    if state is None:
        return [], None
    built: dict[str, TrainingData] = {}
    keys = []
    for parent in parents:
        config = parent.state["extra"]["config"]
        trainer = config["trainer"]
        seed, batch = trainer["seed"], trainer["global_batch_size"]
        key = json.dumps([config["data"], seed, batch], sort_keys=True)
        keys.append(key)
        if key in built:
            continue
        try:
            if problems := untrusted({"data": config["data"]}):
                raise ConfigError(problems)
            with seeded(seed):
                train = build_data(config["data"]).train if built else state.train_data
                samples = indexed(train, RECALIBRATED_SAMPLES)
            order = first_epoch(GlobalSampler(len(samples), batch, seed))  # type: ignore[arg-type]
        except Exception as error:  # the user's own classes run any code
            text = str(error).strip().partition("\n")[0]
            return [], f"the data of {parent.folder} cannot be built ({type(error).__name__}: {text})."
        built[key] = TrainingData(key, samples, order)
    return [built[key] for key in keys], None


def _cpu_state(parent: Parent) -> tuple[TrainState | None, str]:
    """Return a parent's training state on one CPU; if it cannot be built, `None` and the reason."""
    import torch
    import torch.distributed as dist

    from hetexp.core.config import read_config
    from hetexp.core.config.weights import without_weights
    from hetexp.core.errors import ConfigError
    from hetexp.core.instantiate import parameters, untrusted
    from hetexp.core.plan import Plan
    from hetexp.hardware.backends.cpu import CpuBackend
    from hetexp.training.wiring import build_state

    double = any(tensor.dtype == torch.float64 for tensor in parent.tensors.values())
    raw: dict[str, Any] = dict(parent.state["extra"]["config"])
    raw |= {
        "hardware": {"devices": ["cpu"]},
        "strategy": {"_target_": "hetexp.strategy.single.Single"},
        "balancing": {"_target_": "hetexp.balancing.equal.Equal"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.0},  # no step is taken
        "trainer": raw["trainer"] | {"precision": "float64" if double else "float32"} | _NO_STEPS,
        "fault": {"events": []},
        "resume": None,
    }
    if problems := untrusted({name: raw.get(name) for name in ("model", "data")}):
        return None, " ".join(problems)
    try:
        raw["model"] = without_weights(raw["model"], parameters(raw["model"]["_target_"]))
        config = read_config(raw)
        plan = Plan(
            run_id="merge",
            run_dir=str(parent.folder),
            name="merge",
            group=None,
            config=raw,
            devices=(CpuBackend.describe(0),),
            strategy="single",
            shares=(1.0,),
            local_batch_sizes=(config.trainer.global_batch_size,),
            collective_backend="gloo",
            threads=(os.cpu_count() or 1,),
            precisions=(config.trainer.precision,),
            working_dir=str(Path.cwd()),
        )
        return build_state(plan, config, 0, dist.HashStore()), ""
    except ConfigError as error:
        return None, " ".join(error.problems)
    except Exception as error:  # the user's own classes run any code
        return None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
