"""Whole runs on unequal ranks: what is learned, what is counted, what is written."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import Run, Train, difference
from torch.nn import functional
from torch.utils.data import default_collate

from hetexp.core.errors import ConfigError, RunFailedError
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.data.synthetic import Synthetic
from hetexp.model.mlp import MLP
from hetexp.report.diagram.files import has_dot
from hetexp.training.saving.data_facts import PLACES

TINY = (
    "model=mlp",
    "model.hidden_sizes=[16]",
    "data=synthetic",
    "trainer.log_every=1",
)


def layout(*weights: float) -> tuple[str, ...]:
    devices = ",".join(["cpu"] * len(weights))
    return (
        f"hardware.devices=[{devices}]",
        "balancing=manual",
        f"balancing.weights=[{','.join(map(str, weights))}]",
    )


USER_CODE = '''
import json
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset, get_worker_info

from hetexp.model.layered import Pieces
from hetexp.training.loss import Loss


class Recorded(torch.utils.data.Dataset):
    """Remembers, a process a file, which samples were read, in order."""

    facts = {"width": 4}

    def __init__(self, num_samples, folder):
        self.num_samples, self.folder = num_samples, Path(folder)

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        with (self.folder / f"read_{os.getpid()}.txt").open("a") as file:
            file.write(f"{index}\\n")
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, generator=generator)
        return {"x": x, "scale": torch.tensor(2.0)}, x.sum(0, keepdim=True)


class Noisy(torch.utils.data.Dataset):
    """Adds noise of all generators to each sample, and tells it where no loader process does."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        noise = np.random.randn(4) + random.gauss(0.0, 1.0) + torch.randn(4).numpy()
        if get_worker_info() is None:
            print("drawn", index, noise.tolist(), flush=True)
        return torch.tensor(index + noise, dtype=torch.float32), torch.tensor([float(index)])


class Drawn:
    """Draws which of these samples are for evaluation, by all generators."""

    facts = {"width": 4}

    def __init__(self):
        order = np.random.permutation(64)
        first = random.randrange(8) + int(torch.randint(8, ()))
        order = np.roll(order, first).tolist()
        print("split", order, flush=True)
        self.train, self.evaluation = Subset(Noisy(), order[:48]), Subset(Noisy(), order[48:])


class Plain(nn.Module):
    def __init__(self, width=None):
        super().__init__()
        self.linear = nn.Linear(width, 1)
        with torch.no_grad():
            self.linear.weight += random.random() + np.random.rand()

    def forward(self, x):
        return self.linear(x)


class Net(nn.Module):
    def __init__(self, width=None):
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, x, scale):
        return self.linear(x) * scale[:, None]


class Deep(nn.Module):
    def __init__(self, width=None):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, 1)])

    def forward(self, x, scale):
        x = self.begin(x, scale)
        for layer in self.layers:
            x = layer(x)
        return x

    def begin(self, x, scale):
        return x * scale[:, None]

    def pieces(self):
        return Pieces(("layers.0", "layers.1"), begin=self.begin)


class Slowing(torch.optim.SGD):
    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        for group in self.param_groups:
            group["steps"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                parameter.grad /= group["steps"]
        return super().step(closure)


class Boxed(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, ((x[0] > 0).long(), {"box": [x[:2], x[2:]]})


class Boxes:
    """Targets in several parts, one within another."""

    facts = {"input_shape": [4], "num_classes": 2}
    train = evaluation = Boxed()


class OfBoxes(Loss):
    def count(self, targets):
        return len(targets[0])

    def total(self, output, targets):
        label, boxes = targets
        near = sum((output - box).abs().sum() for box in boxes["box"])
        return nn.functional.cross_entropy(output, label, reduction="sum") + near


class Absolute(Loss):
    def count(self, targets):
        return targets.numel()

    def total(self, output, targets):
        return (output - targets).abs().sum()
'''


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A person's own module in a folder of its own."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "my_project.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("my_project", None)


def read_by_ranks(folder: Path) -> list[int]:
    return sorted(int(line) for file in folder.glob("read_*.txt") for line in file.read_text().split())


def test_a_persons_own_model_data_and_loss(train: Train, user_code: Path) -> None:
    """W5: dotted paths are enough, dict inputs become keyword arguments, facts fill null arguments."""
    own = (
        "model=custom",
        "model._target_=my_project.Net",
        "data=custom",
        "data._target_=my_project.Recorded",
        "+data.num_samples=25",
        f"+data.folder={user_code}",
        "trainer.loss=my_project.Absolute",
        "trainer.global_batch_size=8",
        "trainer.max_epochs=1",
        "trainer.log_every=1",
    )
    run = train(*own, *layout(3, 1))
    assert run.summary["status"] == "completed"
    # Cases 3 and 4: 25 samples in batches of 8 end with a batch of one, which leaves a rank without any.
    assert run.summary["steps"] == 4
    assert run.summary["samples"] == 25
    # Each sample once, but those that ranks read before: to compare their data, and to try the model.
    at_start = {0, 1, 6, 12, 18, 24}
    assert [i for i in read_by_ranks(user_code) if i not in at_start] == sorted(set(range(25)) - at_start)
    assert all(math.isfinite(loss) for loss in run.losses)


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_dict_inputs_train_with_measured_shares(train: Train, user_code: Path, strategy: str) -> None:
    """Measuring and cutting call the model as training does."""
    own = (
        "model=custom",
        "model._target_=my_project.Deep",
        "data=custom",
        "data._target_=my_project.Recorded",
        "+data.num_samples=24",
        f"+data.folder={user_code}",
        "trainer.loss=my_project.Absolute",
        "trainer.global_batch_size=8",
        "trainer.max_epochs=1",
        "trainer.log_every=1",
        "trainer.precision=float64",
    )
    run = train(*own, "hardware.devices=[cpu,cpu]", f"strategy={strategy}", "balancing=auto")
    alone = train(*own, "hardware=cpu", "strategy=single")
    assert run.losses == pytest.approx(alone.losses, rel=1e-12)


RANDOM = (
    "model=custom",
    "model._target_=my_project.Plain",
    "data=custom",
    "data._target_=my_project.Drawn",
    "trainer.loss=my_project.Absolute",
    "trainer.global_batch_size=16",
    "trainer.max_epochs=2",
    "trainer.log_every=1",
)


def logged(run: Run, word: str) -> list[list[str]]:
    """What each rank has written after this word."""
    logs = (path.read_text().splitlines() for path in sorted((run.folder / "logs").glob("rank_*.log")))
    return [[line for line in lines if line.startswith(word)] for lines in logs]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0)], ids=["one", "two"])
def test_random_splits_and_samples_follow_the_seed(
    train: Train, user_code: Path, weights: tuple[float, ...], workers: int
) -> None:
    """Of Python, NumPy and torch, in data, model and samples; the same command has the same losses."""
    options = (*RANDOM, *layout(*weights), f"trainer.num_workers={workers}")
    one, again = train(*options), train(*options)
    assert one.losses == again.losses
    assert one.summary["final"]["eval"] == again.summary["final"]["eval"]
    assert difference(one.parameters(), again.parameters()) == 0.0
    splits = [rank for run in (one, again) for rank in logged(run, "split")]
    assert splits == [splits[0]] * (2 * len(weights))
    drawn = [{line.partition("[")[2] for line in rank} for rank in logged(one, "drawn")]
    if len(weights) > 1 and not workers:  # but for those that ranks compare, and try the model with
        assert len(drawn[0] & drawn[1]) <= 2 * PLACES + 2 < len(drawn[0] | drawn[1]) // 2


def test_another_seed_draws_another_split(train: Train, user_code: Path) -> None:
    options = (*RANDOM, *layout(1, 1), "trainer.max_steps=1", "trainer.max_epochs=null")
    splits = [logged(train(*options, f"trainer.seed={seed}"), "split") for seed in (1, 2)]
    assert splits[0][0] == splits[0][1] != splits[1][0] == splits[1][1]


@pytest.mark.parametrize("strategy", ["ddp", "pipeline", "local_sgd", "independent"])
def test_targets_in_several_parts_are_evaluated(train: Train, user_code: Path, strategy: str) -> None:
    """Case 62: lists, tuples and dicts, with the last batch shorter than the others."""
    own = ("data=custom", "data._target_=my_project.Boxes", "trainer.loss=my_project.OfBoxes")
    common = (*TINY[:2], *own, "trainer.max_steps=4", "trainer.global_batch_size=16")
    shares = layout(3, 1) if strategy != "pipeline" else layout(1, 1)[:1]
    run = train(*common, f"strategy={strategy}", *shares, "trainer.precision=float64")
    assert run.summary["final"]["eval"]["loss"] > 0
    if strategy in ("ddp", "pipeline"):
        one = train(*common, "hardware=cpu", "trainer.precision=float64")
        assert run.summary["final"]["eval"] == pytest.approx(one.summary["final"]["eval"], rel=1e-12)


def test_shares_that_round_to_zero(train: Train) -> None:
    """Case 3: 11 samples, batches of 8, weights .8/.15/.05: the tail of 3 leaves two ranks empty."""
    run = train(
        *TINY,
        "data.num_samples=11",
        "trainer.global_batch_size=8",
        "trainer.max_epochs=1",
        "trainer.precision=float64",
        *layout(0.8, 0.15, 0.05),
    )
    alone = train(
        *TINY,
        "data.num_samples=11",
        "trainer.global_batch_size=8",
        "trainer.max_epochs=1",
        "trainer.precision=float64",
        "hardware=cpu",
        "strategy=single",
    )
    assert run.losses == pytest.approx(alone.losses, rel=1e-12)
    assert [row["train/samples"] for row in run.metrics if "train/loss" in row] == [8, 11]


def test_evaluation_counts_each_sample_once(train: Train) -> None:
    """Case 5: the same count and the bit-equal accuracy for every number of ranks and every split."""
    common = (*TINY, "data.num_test_samples=21", "trainer.max_steps=3", "trainer.precision=float64")
    evaluations = [
        train(*common, *chosen).summary["final"]["eval"]
        for chosen in (("hardware=cpu",), layout(1, 1), layout(17, 4), layout(1, 1, 1))
    ]
    assert [e["samples"] for e in evaluations] == [21.0] * 4
    assert len({e["accuracy"] for e in evaluations}) == 1
    assert all(e["loss"] == pytest.approx(evaluations[0]["loss"], rel=1e-12) for e in evaluations)


def test_clipping_reports_the_norm_of_the_whole_batch(train: Train) -> None:
    """Case 7: the same norm before clipping, whatever the split and the accumulation."""
    common = (*TINY, "trainer.max_steps=3", "trainer.clip_norm=0.1", "trainer.precision=float64")
    norms = [
        [row["train/grad_norm"] for row in train(*common, *chosen).metrics if "train/grad_norm" in row]
        for chosen in (("hardware=cpu",), (*layout(6, 2), "trainer.accumulate=2"))
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)
    assert max(norms[0]) > 0.1


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_goes_on_where_the_run_stopped(train: Train, ranks: int) -> None:
    """Cases 33 and 34: another number of ranks, in the middle of an epoch; same losses, same parameters."""
    common = (
        *TINY,
        "data.num_samples=100",
        "trainer.global_batch_size=16",
        "trainer.precision=float64",
        "optimizer.lr=0.01",
        "trainer.schedule=cosine",
        "trainer.max_epochs=null",
    )
    whole = train(*common, "trainer.max_steps=12", *layout(1))
    first = train(*common, "trainer.max_steps=12", "trainer.checkpoint_every=5", *layout(2, 1, 1))
    checkpoint = first.folder / "checkpoints" / "step_00000005"
    second = train(*common, "trainer.max_steps=12", f"resume={checkpoint}", *layout(*[1] * ranks))
    assert [row["step"] for row in second.metrics if "train/loss" in row] == list(range(6, 13))
    assert second.losses == pytest.approx(whole.losses[5:], rel=1e-12)
    rates = [
        [row["train/learning_rate"] for row in run.metrics if "train/loss" in row] for run in (whole, second)
    ]
    assert rates[1] == rates[0][5:]
    for name, value in second.parameters().items():
        assert torch.allclose(value, whole.parameters()[name], rtol=1e-10, atol=1e-14)
    assert second.summary["samples"] == whole.summary["samples"]


def test_resume_takes_a_run_folder(train: Train) -> None:
    first = train(*TINY, "trainer.max_steps=4", "trainer.checkpoint_every=3", "hardware=cpu")
    second = train(*TINY, "trainer.max_steps=6", f"resume={first.folder}", "hardware=cpu")
    assert [row["step"] for row in second.metrics if "train/loss" in row] == [5, 6]


def plain_steps(first: Run, steps: int, **settings: Any) -> dict[str, torch.Tensor]:
    """Go on from a run of SGD by plain torch, with other settings, and return the weights."""
    data, sampler = Synthetic(num_samples=64), GlobalSampler(64, 16, 0)
    model = MLP((16,), data.facts["input_shape"], data.facts["num_classes"]).double()
    model.load_state_dict(first.parameters())
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    (folder,) = (first.folder / "checkpoints").iterdir()
    moments = load_file(folder / "optimizer.safetensors")
    for name, parameter in model.named_parameters():
        optimizer.state[parameter]["momentum_buffer"] = moments[f"{name}/momentum_buffer"]
    position = Position.from_dict(json.loads((folder / "state.json").read_text())["position"])
    for _ in range(steps):
        indices, position = sampler.batch(position)
        inputs, targets = default_collate([data.train[index] for index in indices.tolist()])
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs.double()), targets).backward()
        optimizer.step()
    return model.state_dict()


SGD = (
    *(*TINY, "data.num_samples=64", "trainer.global_batch_size=16", "trainer.precision=float64"),
    *("trainer.max_epochs=null", "optimizer=sgd", "optimizer.momentum=0.9", "hardware=cpu"),
)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"weight_decay": 20.0, "lr": 0.01}, ("weight_decay=20.0 (before: 0.0)", "lr=0.01 (before: 0.05)")),
        ({"momentum": 0.5, "weight_decay": 0.1}, ("momentum=0.5 (before: 0.9)", "weight_decay=0.1")),
    ],
)
def test_other_settings_of_the_optimizer_hold_on_resume(
    train: Train, typed: dict[str, float], said: tuple[str, ...]
) -> None:
    """Case 83: as a new optimizer of torch does that takes the old one's state."""
    first = train(*SGD, "trainer.max_steps=6")
    words = [f"optimizer.{key}={value}" for key, value in typed.items()]
    second = train(*SGD, *words, "trainer.max_steps=9", f"resume={first.folder}")
    settings = {"lr": 0.05, "momentum": 0.9, **typed}
    assert difference(second.parameters(), plain_steps(first, 3, **settings)) <= 1e-12
    (line,) = (line for line in second.screen.splitlines() if "resume: the optimizer" in line)
    assert all(part in line for part in said)


def test_settings_that_the_saved_state_has_nothing_for_are_refused(train: Train) -> None:
    alone = (*TINY, "hardware=cpu")
    first = train(*alone, "trainer.max_steps=2")
    with pytest.raises(RunFailedError, match=r"(?s)amsgrad=True \(before: False\).*max_exp_avg_sq"):
        train(*alone, "trainer.max_steps=4", "optimizer.amsgrad=true", f"resume={first.folder}")


@pytest.mark.parametrize("words", [(), ("optimizer._target_=my_project.Slowing",)])
def test_a_run_that_goes_on_as_it_was_takes_all_from_the_checkpoint(
    train: Train, user_code: Path, words: tuple[str, ...]
) -> None:
    """What an optimizer counts in its groups, too."""
    common = (*SGD, *words)
    whole = train(*common, "trainer.max_steps=6", "trainer.checkpoint_every=3")
    rest = train(*common, "trainer.max_steps=6", f"resume={whole.folder}/step:3")
    assert difference(rest.parameters(), whole.parameters()) == 0.0
    assert "the optimizer has this run's" not in rest.screen
    other = train(*common, "optimizer.lr=0.01", "trainer.max_steps=6", f"resume={whole.folder}/step:3")
    state = json.loads((other.folder / "checkpoints" / "step_00000006" / "state.json").read_text())
    (group,) = state["optimizer"]["param_groups"]
    assert group["values"]["lr"] == group["values"]["initial_lr"] == 0.01
    assert group["values"].get("steps") == (6 if words else None)


def test_a_path_with_an_equals_sign(train: Train, tmp_path: Path) -> None:
    """Case 24: quoted for Hydra it reaches the ranks as it is, and no name of ours needs the quotes."""
    first = train(*TINY, "trainer.max_steps=2", "hardware=cpu", folder=tmp_path / "lr=0.1,step=2")
    assert not any("=" in path.name for path in first.folder.rglob("*"))
    second = train(*TINY, "trainer.max_steps=3", f"resume='{first.folder}'", *layout(1, 1))
    assert second.summary["steps"] == 3


def test_a_planted_pickle_is_refused_unread(train: Train, tmp_path: Path) -> None:
    """Case 35: nothing is ever unpickled."""
    witness = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (witness,))

    planted = tmp_path / "planted.ckpt"
    torch.save(Bomb(), planted)
    with pytest.raises(ConfigError, match="resume"):
        train(*TINY, f"resume={planted}")
    assert not witness.exists()


def test_early_stopping_is_decided_jointly(train: Train) -> None:
    run = train(
        *TINY,
        "trainer.max_steps=200",
        "trainer.eval_every=2",
        "trainer.early_stopping.patience=2",
        "optimizer.lr=0",
        *layout(3, 1),
    )
    assert run.summary["steps"] == 6  # a first evaluation and two without improvement
    assert run.summary["status"] == "completed"


def test_fast_dev_run_leaves_no_checkpoint(train: Train) -> None:
    run = train(*TINY, "debug=fast", *layout(1, 1))
    assert run.summary["steps"] == 2
    assert run.summary["checkpoint"] is None
    assert not (run.folder / "checkpoints").exists()


def test_overfit_batches_repeat(train: Train) -> None:
    run = train(
        *TINY,
        "trainer.overfit_batches=1",
        "trainer.max_steps=60",
        "trainer.max_epochs=null",
        "optimizer.lr=0.02",
        *layout(1, 1),
    )
    assert run.losses[-1] < 0.3 * run.losses[0]


def test_what_a_run_leaves_behind(train: Train) -> None:
    run = train(*TINY, "trainer.max_steps=4", "trainer.eval_every=2", "diagram=true", *layout(3, 1))
    names = {path.name for path in run.folder.iterdir()}
    left = {"checkpoints", "config.yaml", "logs", "metrics.jsonl", "plan.json", "plan.mmd", "summary.json"}
    assert names == left | ({"plan.svg", "plan.png", "plan.pdf"} if has_dot() else set())
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    plan = json.loads((run.folder / "plan.json").read_text())
    assert plan["local_batch_sizes"] == [48, 16]
    devices = run.summary["devices"]
    assert [device["share"] for device in devices] == [0.75, 0.25]
    assert all(device["samples_per_s"] > 0 for device in devices)
    assert run.summary["emulated"] is False
    assert run.summary["versions"]["torch"] == torch.__version__
    assert "cpu:1" in run.screen
    assert "test accuracy" in run.screen


def test_what_trained_what_is_in_plan_summary_and_checkpoint(train: Train) -> None:
    run = train(*TINY, "trainer.max_steps=2", *layout(3, 1))
    plan = json.loads((run.folder / "plan.json").read_text())
    assert [device["torch"] for device in plan["devices"]] == [torch.__version__] * 2
    state = json.loads((Path(run.summary["checkpoint"]) / "state.json").read_text())
    first, second = state["extra"]["devices"]
    assert (first["id"], first["vendor"], first["share"], first["precision"]) == (
        "cpu:0",
        "cpu",
        0.75,
        "float32",
    )
    assert (second["id"], second["share"]) == ("cpu:1", 0.25)
    for device, told in zip((first, second), run.summary["devices"], strict=True):
        assert device["torch"] == told["torch"] == torch.__version__
        assert device["python"] == told["python"]
        assert device["name"] == told["name"]
        assert device["emulated"] is False


def test_emulation_is_labelled_everywhere(train: Train) -> None:
    """Invariant 6: name, plan, screen, summary, metrics."""
    run = train(*TINY, "hardware=nvidia_arc", "trainer.max_steps=4")
    assert run.summary["emulated"] is True
    assert run.summary["link_emulated"] is True
    assert run.summary["time_scale"] > 0
    assert all("(emulated)" in device["name"] for device in run.summary["devices"])
    assert json.loads((run.folder / "plan.json").read_text())["emulated"] is True
    assert "EMULATED DEVICES" in run.screen
    assert "Not a measurement of hardware" in run.screen
    assert 0 < run.summary["efficiency"] < 1.1
    assert run.summary["solo_source"] == "run"  # nothing was measured before it
    assert run.summary["ceiling"] is None


def test_dropout_differs_between_ranks_and_repeats(train: Train) -> None:
    """Spare S6: ranks begin with the same weights and drop other values; the same seed gives the same run."""

    def told(run: Run, word: str) -> list[str]:
        logs = ((run.folder / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1))
        # The last one: the trial before the training says the same of a copy.
        return [[line for line in log.splitlines() if line.startswith(word)][-1] for log in logs]

    options = ("model=custom", "model._target_=adapted.Dropping", "data=synthetic", "data.num_samples=64")
    one, again = (train(*options, "trainer.max_steps=5", *layout(1, 1)) for _ in range(2))
    weights, masks = told(one, "weights"), told(one, "mask")
    assert weights[0] == weights[1]
    assert masks[0] != masks[1]
    assert (weights, masks) == (told(again, "weights"), told(again, "mask"))
    assert one.losses == again.losses
    assert difference(one.parameters(), again.parameters()) == 0.0


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("strategy=ddp", *layout(3, 1)), [7, 8]),
        (("strategy=pipeline", *layout(1, 1)[:1]), [7, 8]),
        (("strategy=local_sgd", "strategy.sync_every=3", *layout(3, 1)), [6, 8]),
        (("strategy=independent", "strategy.merge=false", *layout(3, 1)), [6, 7, 8]),
        (("strategy=single", "hardware=cpu", "trainer.keep_last=1"), [8]),
    ],
    ids=lambda options: options[0].partition("=")[2] if isinstance(options[0], str) else "",
)
def test_a_run_is_saved_as_time_goes_by(train: Train, options: tuple[str, ...], kept: list[int]) -> None:
    """A millisecond is over at each step; two checkpoints stay, or as many as are asked for."""
    common = (*TINY, "trainer.max_steps=8", "trainer.global_batch_size=16", "data.num_samples=64")
    run = train(*common, *options, "trainer.checkpoint_minutes=1.0e-9")
    folders = {path.parent for path in (run.folder / "checkpoints").rglob("step_*")}
    assert len(folders) == (2 if options[0] == "strategy=independent" else 1)
    for folder in folders:
        assert sorted(int(path.name[5:]) for path in folder.iterdir()) == kept
    if options[0] != "strategy=single":
        rest = train(*common, *options, f"resume={run.folder}", "trainer.max_steps=10")
        assert rest.summary["steps"] == 10
        assert [row["step"] for row in rest.metrics if "train/loss" in row] == [9, 10]
