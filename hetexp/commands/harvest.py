"""`hetexp harvest`: a trained model's activations as files that `data=activations` reads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetexp.commands.support.command_line import (
    add_shared,
    at_least_one,
    command_parser,
    exit_code,
    stored_checkpoint,
)

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2**26
_EPILOG = """\
DIR gets train_*.safetensors and evaluation_*.safetensors, of the run's training and evaluation data in their
order, and source.json, which names checkpoint and layer.

examples
  hetexp harvest outputs/2026-01-31/12-00-00-0a1b2c --layer blocks.2 --output activations
  python train.py model=sae data=activations data.folder=activations trainer.loss=reconstruction"""


def main(arguments: Sequence[str]) -> int:
    """Harvest a layer; return 2 if that is impossible."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _run(options), trust=options.trust)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "harvest", "Run a trained model over its data, and write the output of a layer as vectors.", _EPILOG
    )
    add_shared(parser, "run")
    parser.add_argument("--layer", required=True, help="dotted name of a module of the model")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--limit", type=at_least_one, metavar="N", help="most vectors to train on; by default all"
    )
    parser.add_argument(
        "--batch-size", type=at_least_one, default=32, metavar="N", help="samples of a pass (32)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add_shared(parser, "--trust")
    return parser


def _run(options: argparse.Namespace) -> int:
    import torch

    from hetexp.core.errors import ConfigError, must_be
    from hetexp.core.files import write_json
    from hetexp.data.activations import SOURCE
    from hetexp.training.source import SourceModel

    folder = stored_checkpoint(options.run).folder
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise ConfigError(must_be("--output", "a new or an empty folder", str(options.output)))
    source = SourceModel(folder, options.layer)
    dtype = getattr(torch, options.dtype)
    options.output.mkdir(parents=True, exist_ok=True)
    counts = {}
    parts = {"train": (source.data.train, options.limit), "evaluation": (source.data.evaluation, None)}
    for name, (dataset, limit) in parts.items():
        if dataset is not None:
            chunks = (vectors.to(dtype) for vectors in source.vectors(dataset, options.batch_size))
            counts[name] = _write(options.output, name, chunks, limit)
    facts = {"model": source.target, "layer": options.layer, "checkpoint": str(folder.resolve())}
    write_json(options.output / SOURCE, facts | {"vectors": counts, "dtype": options.dtype})
    print(f"Vectors of {options.layer} ({folder}): {json.dumps(counts)} in {options.output}")
    return 0


def _write(folder: Path, name: str, chunks: Iterator[torch.Tensor], limit: int | None) -> int:
    """Write at most `limit` vectors as shards, and return their number."""
    import torch

    from hetexp.checkpoint.tensor_file import write_tensors

    pending: list[torch.Tensor] = []
    total = number = 0

    def flush() -> None:
        nonlocal number
        vectors = torch.cat(pending).contiguous()
        write_tensors(folder / f"{name}_{number:05}.safetensors", {"activations": vectors}, {})
        pending.clear()
        number += 1

    for chunk in chunks:
        if limit is not None:
            chunk = chunk[: limit - total]
        total += len(chunk)
        pending.append(chunk)
        if sum(vectors.nbytes for vectors in pending) >= SHARD_BYTES:
            flush()
        if total == limit:
            break
    if pending:
        flush()
    return total
