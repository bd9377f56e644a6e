"""What is saved comes back to the bit, whatever the model, the optimizer and the wrappers."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from hetexp.checkpoint.folder import TrainingState, load_checkpoint, save_checkpoint
from hetexp.core.errors import CheckpointError

STATE = TrainingState(
    step=100,
    position={"epoch": 2, "sample": 4321},
    schedule={"kind": "cosine", "lr": 0.1 + 0.2, "last": None},
    extra={
        "run_id": "abc",
        "versions": {"torch": "2.13"},
        "devices": ["cpu", "cpu"],
        "config": {"nan": "nan"},
    },
)


class TinyGpt(nn.Module):
    """Embedding and head share one tensor, as in GPT-2."""

    def __init__(self, tied: bool = True, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 11, bias=False)
        self.register_buffer("seen", torch.tensor(3))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embed(tokens)))
        return logits


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (4, 5), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
    optimizer.step()


def assert_same(left: Any, right: Any) -> None:
    """Equal to the bit, with types, dtypes and shapes."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype and left.device == right.device
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


class WithExtraState(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1 / 3, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.0123), foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_comes_back_and_the_next_step_is_the_same(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyGpt()
    optimizer = OPTIMIZERS[name](model.parameters())
    for seed in range(3):
        train_step(model, optimizer, seed)
    folder = save_checkpoint(tmp_path / "checkpoints", model, optimizer, STATE)
    assert folder == tmp_path / "checkpoints" / "step_00000100"

    torch.manual_seed(1)
    other = TinyGpt()
    other_optimizer = OPTIMIZERS[name](other.parameters())
    train_step(other, other_optimizer, 9)
    assert load_checkpoint(folder, other, other_optimizer) == STATE

    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())
    train_step(model, optimizer, 7)
    train_step(other, other_optimizer, 7)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


def test_an_unused_optimizer_comes_back_without_state(tmp_path: Path) -> None:
    model = TinyGpt()
    optimizer = torch.optim.AdamW(model.parameters())
    folder = save_checkpoint(tmp_path, model, optimizer, STATE)
    train_step(model, optimizer, 0)
    load_checkpoint(folder, model, optimizer)
    assert not optimizer.state_dict()["state"]


def test_groups_keep_their_own_values_and_what_a_scheduler_added(tmp_path: Path) -> None:
    def build() -> tuple[TinyGpt, torch.optim.Optimizer]:
        model = TinyGpt()
        groups = [
            {"params": [model.embed.weight], "lr": 0.3, "betas": (0.5, 0.75)},
            {"params": list(model.norm.parameters()), "weight_decay": 0.0},
        ]
        return model, torch.optim.AdamW(groups, lr=0.1)

    model, optimizer = build()
    optimizer.param_groups[1]["initial_lr"] = 0.7
    train_step(model, optimizer, 0)
    folder = save_checkpoint(tmp_path, model, optimizer, STATE)
    other, other_optimizer = build()
    load_checkpoint(folder, other, other_optimizer)
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())
    assert other_optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert other_optimizer.param_groups[1]["initial_lr"] == 0.7


def test_how_a_step_is_computed_stays_with_the_optimizer_at_hand(tmp_path: Path) -> None:
    model = TinyGpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    train_step(model, optimizer, 0)
    folder = save_checkpoint(tmp_path, model, optimizer, STATE)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    load_checkpoint(folder, model, plain)
    assert (plain.param_groups[0]["lr"], plain.param_groups[0]["fused"]) == (0.5, None)
    assert plain.param_groups[0]["foreach"] is False


def test_float32_moments_of_bfloat16_parameters_stay_float32(tmp_path: Path) -> None:
    def build() -> tuple[TinyGpt, torch.optim.Optimizer]:
        model = TinyGpt().to(torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build()
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full_like(parameter, 0.1234567, dtype=torch.float32),
            "master": parameter.detach().float() + 1e-6,
            "count": 5,
            "history": [torch.zeros(2, dtype=torch.float64), (1, 2.5, None)],
        }
    folder = save_checkpoint(tmp_path, model, optimizer, STATE)
    other, other_optimizer = build()
    load_checkpoint(folder, other, other_optimizer)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_same(other_optimizer.state[mine], optimizer.state[theirs])
    first = other_optimizer.state[other.embed.weight]
    assert first["exp_avg"].dtype == torch.float32 and first["exp_avg"].flatten()[0] == torch.tensor(
        0.1234567
    )


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model = TinyGpt()
    folder = save_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()), STATE)
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    assert sorted(stored) == ["embed.weight", "norm.bias", "norm.weight", "seen"]
    other = TinyGpt()
    load_checkpoint(folder, other, None)
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.embed.weight)
    library = TinyGpt()
    safetensors.torch.load_model(library, folder / "model.safetensors")
    assert_same(dict(library.state_dict()), dict(model.state_dict()))


def test_non_contiguous_parameters_and_views_of_one_storage_come_back(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(6, 4)
            self.transposed = nn.Parameter(torch.randn(3, 5).t())
            self.left = nn.Parameter(whole[:, :2])
            self.upper = nn.Parameter(whole[:3])
            self.register_buffer("expanded", torch.tensor([1.5]).expand(4))
            self.register_buffer("empty", torch.empty(0, 3))

    model = Views()
    assert not model.transposed.is_contiguous()
    folder = save_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()), STATE)
    other = Views()
    other.expanded = torch.zeros(4)
    load_checkpoint(folder, other, None)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_wrappers_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    model = TinyGpt()
    compiled: nn.Module = torch.compile(copy.deepcopy(model))  # type: ignore[assignment]
    inner = copy.deepcopy(model)
    inner.norm = torch.compile(inner.norm)  # type: ignore[assignment]
    wrapped = nn.DataParallel(inner)
    assert any("module.norm._orig_mod." in name for name in wrapped.state_dict())
    plain = save_checkpoint(tmp_path / "plain", model, torch.optim.SGD(model.parameters()), STATE)
    for kind, other in (("compiled", compiled), ("wrapped", wrapped)):
        optimizer = torch.optim.SGD(other.parameters(), momentum=0.9)
        folder = save_checkpoint(tmp_path / kind, other, optimizer, STATE)
        name = "model.safetensors"
        assert (folder / name).read_bytes() == (plain / name).read_bytes()
        fresh = TinyGpt()
        load_checkpoint(folder, fresh, torch.optim.SGD(fresh.parameters(), momentum=0.9))
        assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
        with torch.no_grad():
            next(other.parameters()).zero_()
        load_checkpoint(plain, other, None)
        assert_same(list(other.state_dict().values()), list(model.state_dict().values()))


@pytest.mark.parametrize("what", ["optimizer value", "foreign parameter", "state", "extra state", "sparse"])
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(what: str, tmp_path: Path) -> None:
    model = TinyGpt()
    optimizer = torch.optim.SGD(model.parameters())
    state = STATE
    if what == "optimizer value":
        optimizer.param_groups[0]["hook"] = print
    elif what == "foreign parameter":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
    elif what == "state":
        state = TrainingState(1, {}, {}, {"path": tmp_path})
    elif what == "extra state":
        model.odd = WithExtraState()
    else:
        model.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match="must be|must hold"):
        save_checkpoint(tmp_path / "checkpoints", model, optimizer, state)
    assert not list(tmp_path.glob("checkpoints/*"))


FRESH_PROCESS = """
import pickle, sys
import torch, torch._dynamo  # the latter derives a class from pickle.Pickler
from pathlib import Path

def refuse(*args, **kwargs):
    raise SystemExit("a pickle was read or written")

pickle.Unpickler = pickle.Pickler = pickle.load = pickle.loads = pickle.dump = pickle.dumps = refuse
torch.load = torch.save = refuse
from hetexp.checkpoint.folder import find_checkpoint, load_checkpoint, save_checkpoint

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
state = load_checkpoint(find_checkpoint(Path(sys.argv[1])), model, optimizer)
save_checkpoint(Path(sys.argv[1]) / "again", model, optimizer, state)
print(state.step, float(model.weight.sum()).hex(), len(optimizer.state))
"""


def test_a_fresh_process_saves_and_loads_without_pickle(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    folder = save_checkpoint(tmp_path / "checkpoints", model, optimizer, STATE)
    result = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout.split() == ["100", float(model.weight.sum()).hex(), "2"], result.stderr
    again = tmp_path / "again" / "step_00000100"
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
