"""Train each model of examples/zoo by all ways, compare it with plain torch, write docs/reference/zoo.md.

    pip install 'hetexp[zoo]'
    python scripts/zoo.py                        all models, and the table
    python scripts/zoo.py --only bert,gpt2 --figures all.json
                                                 some of them; the others' figures are those of the file

The reference of every row is `python MODEL.py`: the model's own library and torch on one device, no hetexp.
`hetexp launch` runs the same script's second loop, `hetexp train` the same model and data with a YAML file.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
ZOO = ROOT / "examples" / "zoo"
PAGE = ROOT / "docs/reference/zoo.md"
BEGIN, END = "<!-- table of scripts/zoo.py -->", "<!-- /table -->"
EXACT = 1e-12
FLOAT32 = 2.0**-22
"""Two roundings of float32, for models that compute a part in it."""
ROUNDING = "torch alone, rows reversed"
"""The plain script again, each batch's samples backwards: what rounding alone does on one device."""
SHARES = {"3:1": (3, 1), "5:2:1": (5, 2, 1)}
WAYS = ("launch", "train")


@dataclass(frozen=True)
class Model:
    """A script of the zoo, and what is known of it before it is measured."""

    name: str
    what: str
    needs: tuple[str, ...]
    note: str = ""
    allowed: float = EXACT
    """Largest difference; infinity: each device draws its own random numbers."""
    ways: Sequence[str] = WAYS
    setting: str | None = None
    """Environment variable that its runs set to 1."""

    @property
    def title(self) -> str:
        return f"{self.name}, as it comes" if self.setting else self.name


HUGGING_FACE, VISION, TIMM = ("transformers",), ("torchvision",), ("timm", "torchvision")
IN_FLOAT32 = (
    "is computed in float32, where a gradient rounds otherwise if ranks or counts scale it on its way"
)
DRAWN = "draws anchors and proposals at random, and each device draws its own"
ANCHORS = "torchvision computes the loss of the anchors in float32"
COUPLED = "a loss that couples the samples of a batch is no sum over them: no YAML file can name it"
MODELS = (
    Model("resnet", "timm ResNet-50, BatchNorm", TIMM),
    Model("efficientnet", "timm EfficientNet, its own BatchNorm with activation", TIMM),
    Model("vit", "timm ViT", TIMM),
    Model("segmentation", "torchvision DeepLabV3, two heads, unlabelled pixels", VISION),
    Model("detection", "torchvision Faster R-CNN, all anchors taken", VISION, ANCHORS, FLOAT32),
    Model("detection", "the same as it comes", VISION, DRAWN, math.inf, setting="ZOO_DRAWS"),
    Model("bert", "transformers BERT classification, padded", HUGGING_FACE),
    Model("gpt2", "transformers GPT-2, own loss in float64", HUGGING_FACE),
    Model(
        "gpt2",
        "the same as it comes",
        HUGGING_FACE,
        f"its loss {IN_FLOAT32}",
        FLOAT32,
        setting="ZOO_FLOAT32_LOSS",
    ),
    Model("bart", "transformers BART, encoder-decoder", HUGGING_FACE),
    Model("t5", "transformers T5, encoder-decoder", HUGGING_FACE, f"its normalisation {IN_FLOAT32}", FLOAT32),
    Model("unet", "diffusers UNet2D", ("diffusers", "torchvision")),
    Model("graph", "torch_geometric GIN, BatchNorm, GraphNorm", ("torch_geometric",)),
    Model("lstm", "LSTM over packed sequences", ()),
    Model("clip", "transformers CLIP, contrastive loss", HUGGING_FACE, COUPLED, ways=("launch",)),
)


@dataclass(frozen=True)
class Trained:
    """The losses of all steps, and the trained parameters and buffers."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]


class RunError(Exception):
    """A run that ended with an error; the text is the last line that says why."""


def missing(model: Model) -> list[str]:
    """Return the packages of a model that are not installed."""
    return [name for name in model.needs if importlib.util.find_spec(name) is None]


def run(command: Sequence[str]) -> str:
    """Run a command in the zoo's folder, and return what it printed.

    Raises:
        RunError: it failed.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *command], cwd=ZOO, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        lines = [line.strip(" │") for line in (ended.stdout + "\n" + ended.stderr).splitlines()]
        raise RunError("\n".join(line for line in lines if line))
    return ended.stdout


def alone(model: Model, way: str, epochs: int, backwards: bool = False) -> Trained:
    """Train on one device without hetexp, in this process, by the script's loop of that name."""
    if str(ZOO) not in sys.path:
        sys.path.insert(0, str(ZOO))
    script, order = importlib.import_module(model.name), importlib.import_module("common").Order
    losses: list[float] = []
    order.reverses = backwards
    trained = getattr(script, way)(epochs, lambda loss: losses.append(loss.item()))
    return Trained(losses, {name: value.cpu().clone() for name, value in trained.state_dict().items()})


def together(
    model: Model, way: str, shares: Sequence[int], folder: Path, epochs: int, devices: Sequence[str]
) -> Trained:
    """Train on a rank for each share, on CPU ranks unless devices are given, by `launch` or `train`."""
    run_dir = folder / f"{way}-{len(shares)}"
    options = [
        f"hardware.devices=[{','.join(devices or ['cpu'] * len(shares))}]",
        "balancing=manual",
        f"balancing.weights={list(shares)}".replace(" ", ""),
        "hardware.threads_per_rank=1",
        "launch.start_method=forkserver",
        "logger=none",
        "diagram=false",
        "monitor=none",
        f"hydra.run.dir={run_dir}",
    ]
    if way == "launch":
        words = ["launch", f"{model.name}.py", *options, "--", "hetexp", "--epochs", str(epochs)]
    else:
        words = ["train", f"experiment={model.name}", f"trainer.max_epochs={epochs}", *options]
    run(["-m", "hetexp.cli", *words])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    newest = sorted(run_dir.glob("checkpoints/*/model.safetensors"))[-1]
    return Trained([row["train/loss"] for row in rows if "train/loss" in row], load_file(newest))


def differences(one: Trained, reference: Trained) -> tuple[float, float]:
    """Return the largest relative difference of a step's loss, and ‖Δθ‖ / ‖θ‖ of the trained state."""
    if len(one.losses) != len(reference.losses):
        raise RunError(f"{len(one.losses)} losses instead of {len(reference.losses)}")
    loss = max(abs(a - b) / abs(b) for a, b in zip(one.losses, reference.losses, strict=True))
    delta = size = 0.0
    for name, value in one.parameters.items():
        wanted = reference.parameters[name].double()
        delta += float((value.double() - wanted).pow(2).sum())
        size += float(wanted.pow(2).sum())
    kept = [reference.parameters[name] for name in one.parameters]
    for name in reference.parameters.keys() - one.parameters.keys():
        if not any(torch.equal(reference.parameters[name], value) for value in kept):
            raise RunError(f"{name} is missing")  # and no second name of a tied weight
    return loss, (delta / size) ** 0.5


def lines_added(name: str, way: str) -> int:
    """Return how many statements of the loop with hetexp or Accelerate the plain loop does not have."""
    functions = {
        node.name: ast.unparse(node.body).splitlines()  # type: ignore[arg-type]  # it takes a list as well
        for node in ast.parse((ZOO / f"{name}.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    changed = difflib.ndiff(functions["plain"], functions[f"with_{way}"])
    return sum(line.startswith("+ ") for line in changed)


def yaml_lines(name: str) -> str:
    """Return the number of lines of a model's YAML file that are no comment."""
    path = ZOO / "conf" / "experiment" / f"{name}.yaml"
    lines = path.read_text().splitlines() if path.exists() else []
    return str(sum(not line.startswith("#") for line in lines) or "–")


def measure(model: Model, epochs: int, devices: Sequence[str] = ()) -> dict[str, Any]:
    """Return a row of the table: the figures of each way and shares, or the reason why there are none."""
    row: dict[str, Any] = {}
    for setting in filter(None, (other.setting for other in MODELS)):
        os.environ.pop(setting, None)
    if model.setting:
        os.environ[model.setting] = "1"
    reference = alone(model, "plain", epochs)
    row["steps"] = len(reference.losses)
    if not devices:  # Accelerate would take the card in this process
        row[ROUNDING] = differences(alone(model, "plain", epochs, backwards=True), reference)
        row["accelerate"] = differences(alone(model, "with_accelerate", epochs), reference)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for way in model.ways:
            for shares, parts in SHARES.items():
                if devices and len(devices) != len(parts):
                    continue
                try:
                    trained = together(model, way, parts, folder, epochs, devices)
                    row[f"{way} {shares}"] = differences(trained, reference)
                except RunError as error:
                    row[f"{way} {shares}"] = str(error)
    return row


def is_right(model: Model, row: Mapping[str, Any]) -> bool:
    """Tell whether all runs of a row ended, as near to the reference as the model allows."""
    figures = [value for key, value in row.items() if key not in ("steps", ROUNDING)]
    return bool(figures) and all(not isinstance(f, str) and max(f) <= model.allowed for f in figures)


def cell(value: Any) -> str:
    if value is None:
        return "–"
    return "fails" if isinstance(value, str) else "{:.0e} / {:.0e}".format(*value)


def table(rows: Sequence[tuple[Model, Mapping[str, Any]]]) -> str:
    """Return the table, and below it why some of its figures are what they are."""
    runs = [f"{way} {shares}" for way in WAYS for shares in SHARES]
    head = ["model", ROUNDING, *runs, "lines: hetexp", "Accelerate", "YAML"]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    notes = [f"- {model.title}: {model.note}." for model, _ in rows if model.note]
    for model, row in rows:
        added = [str(lines_added(model.name, way)) for way in ("hetexp", "accelerate")]
        figures = [cell(row.get(key)) for key in (ROUNDING, *runs)]
        link = f"{model.what} (`{model.name}.py`)"
        lines.append(" | ".join([link, *figures, *added, yaml_lines(model.name)]))
        failed = [(key, row[key]) for key in runs if isinstance(row.get(key), str)]
        notes += [f"- {model.title}, {key}: {text.splitlines()[-1]}" for key, text in failed]
    return "\n".join([*(f"| {line} |" for line in lines), "", *notes])


def versions() -> str:
    names = sorted({name for model in MODELS for name in model.needs} | {"torch", "accelerate"})
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    return ", ".join(f"{name} {version(name)}" for name in found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of models, with commas")
    parser.add_argument("--epochs", type=int, default=4, help="of 5 steps each")
    parser.add_argument("--figures", type=Path, help="JSON file that keeps the figures of each model")
    parser.add_argument(
        "--devices",
        type=lambda text: text.split(","),
        default=[],
        help="of the ranks, with commas, as cuda:0,cpu; then the page stays as it is",
    )
    options = parser.parse_args()
    kept = options.figures is not None and options.figures.exists()
    rows: dict[str, dict[str, Any]] = json.loads(options.figures.read_text()) if kept else {}
    for model in MODELS:
        if options.only and model.name not in options.only:
            continue
        if absent := missing(model):
            print(f"{model.title}: needs {', '.join(absent)}", flush=True)
            continue
        row = rows[model.title] = measure(model, options.epochs, options.devices)
        for key, value in row.items():
            shown = value if isinstance(value, str | int) else cell(value)
            print(f"{model.title}, {key}: {shown}", flush=True)
        if options.figures is not None:
            options.figures.write_text(json.dumps(rows, indent=1))
    measured = [(model, rows[model.title]) for model in MODELS if model.title in rows]
    text = f"{table(measured)}\n\nWith {versions()}."
    print(text)
    if len(measured) == len(MODELS) and not options.devices:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    wrong = [model.title for model in MODELS if not is_right(model, rows.get(model.title, {}))]
    if wrong:
        print(f"Missing, or not as they should be: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
