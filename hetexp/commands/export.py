"""`hetexp export`: a checkpoint's weights for any other program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hetexp.commands.support.command_line import add_shared, command_parser, exit_code, stored_checkpoint

_EPILOG = """\
DIR gets model.safetensors, every tensor by the name that the model has for it, and config.json. Of adapters
(model=hf_causal_lm) it gets adapter_model.safetensors and adapter_config.json, as peft reads them, of a
sparse autoencoder (model=sae) sae_weights.safetensors and cfg.json, which SAELens loads; and hetexp.json.

examples
  hetexp export outputs/2026-01-31/12-00-00-0a1b2c --output weights           the run's newest checkpoint
  hetexp export outputs/2026-01-31/12-00-00-0a1b2c/best --output weights      its best one
  hetexp export outputs/2026-01-31/12-00-00-0a1b2c/step:100 --output weights --dtype bfloat16"""

_DTYPES = ("float64", "float32", "bfloat16", "float16")


def main(arguments: Sequence[str]) -> int:
    """Export one checkpoint; return 2 if it cannot be read or written."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _run(options), drives_torch=False, trust=options.trust)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "export", "Write a checkpoint's weights as model.safetensors and config.json.", _EPILOG
    )
    add_shared(parser, "run")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the files")
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating-point tensors; by default unchanged")
    parser.add_argument("--force", action="store_true", help="replace an earlier export in DIR")
    add_shared(parser, "--trust", "--trust-owner")
    return parser


def _run(options: argparse.Namespace) -> int:
    import torch

    from hetexp.checkpoint.export import ABOUT, CONFIG, WEIGHTS, export
    from hetexp.core.errors import ConfigError, must_be
    from hetexp.core.files import check_owner

    check_owner(options.output, options.trust_owner, "--output", "--trust-owner {}")
    checkpoint = stored_checkpoint(options.run, contents=False)
    existing = [name for name in (WEIGHTS, CONFIG, ABOUT) if (options.output / name).exists()]
    if existing and not options.force:
        fix = f"It holds {' and '.join(existing)}; --force replaces them."
        raise ConfigError(must_be("--output", "a new folder", str(options.output), fix))
    for sentence in checkpoint.skipped:
        print(sentence)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    about = export(checkpoint.folder, options.output, dtype, say=lambda text: print(text, file=sys.stderr))
    print(f"Weights of step {about['step']} ({checkpoint.folder}): {options.output / about['weights']}")
    return 0
