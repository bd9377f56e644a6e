"""The examples of docs/how-to/own-strategy.md, word for word: a folder of them outside the package.

No command starts in that folder.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from hetexp.app import conf_dir
from hetexp.core.split import apportion
from hetexp.data.sampler import GlobalSampler, Position

GUIDE = conf_dir().parent / "docs" / "how-to" / "own-strategy.md"
BLOCK = re.compile(r"^```(?:python|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# (\S+\.(?:py|yaml))\n", re.MULTILINE)
PROJECT = {
    "my_points.py": """\
import torch
from torch.utils.data import TensorDataset


class Points(TensorDataset):
    facts = {"width": 8, "num_classes": 3}

    def __init__(self):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        super().__init__(x, x[:, :3].argmax(dim=1))
""",
    "my_net.py": """\
import torch


class Net(torch.nn.Linear):
    def __init__(self, width=None, num_classes=None):
        super().__init__(width, num_classes)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)
""",
    "conf/data/points.yaml": "_target_: my_points.Points\n",
    "conf/model/net.yaml": "_target_: my_net.Net\n",
}
STEPS, EVERY, BATCH, RATE = 20, 10, 12, 0.05
JOB = (
    "model=net",
    "data=points",
    "optimizer=sgd",
    f"optimizer.lr={RATE}",
    "balancing=halving",
    "logger=none",
    "diagram=false",
    "monitor=none",
    "hardware.threads_per_rank=1",
    "launch.start_method=forkserver",
    "trainer.seed=0",
    "trainer.precision=float64",
    f"trainer.global_batch_size={BATCH}",
    "trainer.max_epochs=null",
    f"trainer.max_steps={STEPS}",
    f"trainer.eval_every={EVERY}",
    f"trainer.checkpoint_every={EVERY}",
    "trainer.log_every=1",
)
NUM_BYTES = 8 * (8 * 3 + 3)
"""Of all weights, and so of one gradient."""
SHARES = {2: (2 / 3, 1 / 3), 3: (4 / 7, 2 / 7, 1 / 7)}
"""What the policy of the guide gives so many devices."""
Weights = dict[str, torch.Tensor]


@dataclass
class Folder:
    """A folder with the examples, and commands that use it from elsewhere."""

    conf: Path
    here: Path

    def start(self, command: str, *words: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "hetexp.cli", command, "--config-dir", str(self.conf), *words]
        self.here.mkdir(exist_ok=True)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            line, cwd=self.here, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """Return what a command printed; it must end with this exit code."""
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == code, out + err
    return f"{out}\n{err}"


def examples() -> dict[str, str]:
    """Return the files of the guide by name; each begins with a comment that names it."""
    parts = [FILE.split(block)[1:] for block in BLOCK.findall(GUIDE.read_text(encoding="utf-8"))]
    return {name: text for part in parts for name, text in zip(part[::2], part[1::2], strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, hetexp_home: Path) -> Folder:
    root = tmp_path_factory.mktemp("ideas")
    for name, text in {**examples(), **PROJECT}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return Folder(root / "conf", root / "elsewhere")


@pytest.fixture(scope="module")
def sweep(folder: Folder) -> Path:
    """The folder of compare_strategies with ddp and both strategies of the guide."""
    words = ("experiment=compare_strategies", "strategy=ddp,sign_vote,gossip", "hardware=imaginary", *JOB)
    screen = ended(folder.start("train", *words, "hardware.time_scale=null", "hydra.sweep.dir=sweep"))
    assert "Report: " in screen
    return folder.here / "sweep"


@pytest.fixture(scope="module")
def runs(sweep: Path) -> dict[str, Path]:
    """Strategy → its run of the sweep."""
    folders = [path.parent for path in sweep.glob("*/summary.json")]
    return {summary(path)["strategy"]: path for path in folders}


@pytest.fixture(scope="module")
def resumed(folder: Folder, runs: dict[str, Path]) -> dict[str, Path]:
    """Strategy → the run that goes on from half of it, on three devices."""
    started = {
        name: folder.start(
            "train",
            *("hardware=cpu", "hardware.devices=[cpu,cpu,cpu]", *JOB, f"strategy={name}"),
            f"resume={runs[name]}/checkpoints/step_{EVERY:08}",
            f"hydra.run.dir={name}",
        )
        for name in ("sign_vote", "gossip")
    }
    for process in started.values():
        ended(process)
    return {name: folder.here / name for name in started}


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return loaded


def weights(run: Path, step: int) -> Weights:
    return load_file(run / "checkpoints" / f"step_{step:08}" / "model.safetensors")


# ------------------------------------------------------------ the same steps in one process


def batches(shares: Sequence[float]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield each step's samples, divided among the ranks."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).double()
    y = x[:, :3].argmax(dim=1)
    sampler, position = GlobalSampler(len(x), BATCH, seed=0), Position()
    while True:
        indices, position = sampler.batch(position)
        parts = torch.from_numpy(indices).split(list(apportion(len(indices), shares).counts))
        yield [(x[part], y[part]) for part in parts]


def gradient_of(model: Weights, x: torch.Tensor, y: torch.Tensor) -> Weights:
    """Return the gradient of the mean loss over some samples."""
    leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
    loss = cross_entropy(x @ leaves["weight"].T + leaves["bias"], y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def vote(model: Weights, shares: Sequence[float], first: int, last: int) -> Weights:
    """Return the weights after steps of sign descent, from those after `first` steps."""
    for step, parts in zip(range(last), batches(shares), strict=False):
        if step < first:
            continue
        gradients = [(len(y), gradient_of(model, x, y)) for x, y in parts if len(y)]
        votes = {name: sum(count * g[name].sign() for count, g in gradients) for name in model}
        model = {name: value - RATE * torch.as_tensor(votes[name]).sign() for name, value in model.items()}
    return model


def gossip(model: Weights, shares: Sequence[float], first: int, last: int) -> Weights:
    """Return the weights after steps of gossip averaging, from those after `first` steps."""
    ranks, counts = [model] * len(shares), [0] * len(shares)
    for step, parts in zip(range(last), batches(shares), strict=False):
        if step < first:
            continue
        for rank, (x, y) in enumerate(parts):
            if len(y):
                gradient, counts[rank] = gradient_of(ranks[rank], x, y), counts[rank] + len(y)
                ranks[rank] = {n: value - RATE * gradient[n] for n, value in ranks[rank].items()}
        if (step + 1) % EVERY:
            for left in range(step % 2, len(ranks) - 1 + step % 2, 2):
                right = (left + 1) % len(ranks)
                ranks[left] = ranks[right] = mean([ranks[left], ranks[right]])
        else:
            ranks, counts = [mean(ranks, counts)] * len(ranks), [0] * len(ranks)
    return ranks[0]


def mean(models: Sequence[Weights], counts: Sequence[int] | None = None) -> Weights:
    counts = counts or [1] * len(models)
    weighted = list(zip(counts, models, strict=True))
    return {n: torch.stack([c * m[n] for c, m in weighted]).sum(0) / sum(counts) for n in models[0]}


@pytest.mark.parametrize(("name", "reference"), [("sign_vote", vote), ("gossip", gossip)])
def test_steps_are_those_of_a_few_lines(
    name: str, reference: Callable[..., Weights], runs: dict[str, Path], resumed: dict[str, Path]
) -> None:
    """Also after a resume on three devices, which goes on at the same step with the same weights."""
    begun = {"weight": torch.zeros(3, 8).double(), "bias": torch.zeros(3).double()}
    half = weights(runs[name], EVERY)
    expected = {
        runs[name]: reference(reference(begun, SHARES[2], 0, EVERY), SHARES[2], EVERY, STEPS),
        resumed[name]: reference(half, SHARES[3], EVERY, STEPS),
    }
    for run, model in expected.items():
        trained = weights(run, STEPS)
        assert trained.keys() == model.keys()
        for tensor, value in model.items():
            assert float((trained[tensor] - value).abs().max()) <= 1e-12
    steps = [json.loads(line)["step"] for line in (resumed[name] / "metrics.jsonl").open(encoding="utf-8")]
    assert min(steps) == EVERY + 1
    assert summary(resumed[name])["world_size"] == 3


@pytest.mark.parametrize("name", ["sign_vote", "gossip"])
def test_the_summary_counts_what_travels(name: str, runs: dict[str, Path]) -> None:
    found, ddp = summary(runs[name]), summary(runs["ddp"])
    assert (found["exact"], ddp["exact"]) == (False, True)
    assert found["comm"]["bytes_per_step"] == ddp["comm"]["bytes_per_step"] == NUM_BYTES
    assert found["comm"]["backend"] == ddp["comm"]["backend"]
    assert 0 < found["comm"]["exposed_s"] < found["measured_step_s"]
    devices = [(device["id"], device["vendor"], device["local_batch"]) for device in found["devices"]]
    assert devices == [("imaginary:0", "acme", 8), ("cpu:0", "cpu", 4)]


def test_the_report_compares_them(sweep: Path) -> None:
    page = (sweep / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("ddp", "sign_vote", "gossip"))


def test_help_lists_them(folder: Folder) -> None:
    screen = ended(folder.start("train", "--help"))
    options = {"strategy": ("sign_vote", "gossip"), "balancing": ("halving",), "hardware": ("imaginary",)}
    for group, names in options.items():
        (line,) = re.findall(rf"^\W*{group}: (.*)$", screen, re.MULTILINE)
        assert set(names) <= set(line.split(", "))


def test_a_plan_predicts_what_emulated_cards_take(folder: Folder) -> None:
    job = (*JOB, "hardware=nvidia_arc", "trainer.precision=float32", f"trainer.max_steps={EVERY}")
    plan = folder.start("plan", *job, "--json")
    scales = {"sign_vote": "null", "gossip": "100"}  # the first one is found by a rehearsal
    runs = {
        name: folder.start(
            "train",
            *job,
            f"strategy={name}",
            f"hardware.time_scale={scale}",
            f"hydra.run.dir=emulated_{name}",
        )
        for name, scale in scales.items()
    }
    rows = {(row["strategy"], row["policy"]): row for row in json.loads(ended(plan))["rows"]}
    mine = {name: rows[name, "halving"] for name in ("ddp", "independent", *runs)}
    assert {name: row["exact"] for name, row in mine.items()} == {
        "ddp": True,
        "independent": False,
        "sign_vote": False,
        "gossip": False,
    }
    seconds = {name: row["predicted_step_s"] for name, row in mine.items()}
    assert seconds["independent"] < seconds["ddp"]
    for name, process in runs.items():
        ended(process)
        found = summary(folder.here / f"emulated_{name}")
        # The model is a single bucket, and on two devices every step of gossip is an average over all.
        assert seconds[name] == pytest.approx(seconds["ddp"])
        assert found["predicted_step_s"] == pytest.approx(seconds[name] * found["time_scale"])
        assert found["comm"]["bytes_per_step"] == NUM_BYTES / 2


def test_wrong_options_are_refused(folder: Folder) -> None:
    wrong = {
        "sign_vote": (
            "abstain_below=-1",
            "`strategy.abstain_below` must be greater than or equal to 0, but is -1 instead.",
        ),
        "gossip": ("sync_every=0", "`strategy.sync_every` must be greater than 0, but is 0 instead."),
    }
    policy = "`balancing.ratio` must be greater than 0, but is -1 instead."
    started = {
        told: folder.start(
            "train",
            *JOB,
            "hardware=imaginary",
            f"strategy={name}",
            f"strategy.{option}",
            "balancing.ratio=-1",
        )
        for name, (option, told) in wrong.items()
    }
    for told, process in started.items():
        screen = ended(process, 2)
        assert told in screen
        assert policy in screen
