"""`hetexp.setup` in a process of its own: the loop, what is kept, and what is refused."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_loop
import pytest
import torch
import torch.distributed as dist
from support import difference, plan_on, unbuilt_config
from torch import nn
from torch.utils.data import TensorDataset

import hetexp
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, SetupError, UsageError
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.library.setup import Launched, begin_as


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all tests compute alike, also where there is a card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


Loop = Callable[..., tuple[hetexp.Run, list[dict[str, torch.Tensor]]]]


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    """Train a case of `own_loop` and return the run and the weights after each step."""

    def train(
        case: str, steps: int, *, resume: Path | None = None, save: int | None = None, **options: Any
    ) -> tuple[hetexp.Run, list[dict[str, torch.Tensor]]]:
        model, optimizer, data = own_loop.make(case)
        given = {"global_batch_size": own_loop.BATCH, "seed": own_loop.SEED, "run_dir": tmp_path / "run"}
        run = hetexp.setup(model, optimizer, data, **{**given, **options})
        if resume is not None:
            assert run.resume(resume)
        weights = []
        while run.step < steps:
            for inputs, targets in run.batches():
                loss = own_loop.mean_loss(run.model(inputs), targets)
                run.backward(loss, count=(targets != -100).sum())
                if run.step_due:
                    if case == "tokens":
                        run.clip_norm(own_loop.CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
                    weights.append(own_loop.snapshot(model))
                    if run.step == save:
                        run.save()
                    if run.step == steps:
                        break
        return run, weights

    return train


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 3}, {"microbatch_size": 5}], ids=["whole", "accumulate", "microbatches"]
)
def test_the_loop_is_the_plain_one(loop: Loop, options: dict[str, int]) -> None:
    _, weights = loop("tokens", 20, **options)
    reference = [expected for _, expected in own_loop.plain_loop("tokens", 20)]
    assert max(map(difference, weights, reference)) <= 1e-12


def test_a_gradient_of_one_pass_is_plain_torchs_to_the_bit() -> None:
    """Without other ranks and microbatches no gradient is scaled, which may round and takes time."""
    torch.manual_seed(0)
    model, data = nn.Linear(5, 3), TensorDataset(torch.randn(49, 5), torch.randint(3, (49,)))
    run = hetexp.setup(model, torch.optim.SGD(model.parameters()), data, global_batch_size=49, seed=5)
    for inputs, targets in run.batches():
        run.backward(nn.functional.cross_entropy(run.model(inputs), targets))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        expected = torch.autograd.grad(loss, tuple(model.parameters()))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, gradients, expected))
        assert len(gradients) == len(expected)


def test_a_sum_is_no_mean(tmp_path: Path) -> None:
    model, optimizer, data = own_loop.make("rows")
    run = hetexp.setup(model, optimizer, data, global_batch_size=32, seed=own_loop.SEED, microbatch_size=7)
    for inputs, targets in run.batches():
        loss = nn.functional.cross_entropy(run.model(inputs), targets, reduction="sum")
        run.backward(loss, reduction="sum")
        if run.step_due:
            optimizer.step()
            optimizer.zero_grad()
    *_, (_, expected) = own_loop.plain_loop("rows", 3)
    assert difference(own_loop.snapshot(model), expected) < 1e-6
    assert not list(tmp_path.iterdir())


def test_epochs_order_and_break() -> None:
    model, optimizer, _ = own_loop.make("rows")
    data = TensorDataset(torch.randn(20, 5), torch.arange(20))
    run = hetexp.setup(model, optimizer, data, global_batch_size=8, seed=5)
    sampler, position = GlobalSampler(20, 8, 5), Position()

    def steps(most: int) -> list[list[int]]:
        seen: list[list[int]] = []
        for inputs, numbers in run.batches():
            if len(seen) == most:
                break
            run.backward(run.model(inputs).sum())
            seen.append(numbers.tolist())
        return seen

    found = [*steps(1), *steps(9), *steps(9)]
    assert run.epoch == 2
    assert [len(one) for one in found] == [8, 8, 4, 8, 8, 4]
    for one in found:
        indices, position = sampler.batch(position)
        assert one == indices.tolist()


def test_a_checkpoint_in_the_middle_of_an_epoch(loop: Loop, tmp_path: Path) -> None:
    _, whole = loop("tokens", 8, save=4)
    run, rest = loop("tokens", 8, resume=tmp_path / "run")
    assert run.step == 8
    assert len(rest) == 4
    assert difference(rest[-1], whole[-1]) == 0.0
    with pytest.raises(ConfigError, match="resume"):
        run.resume(tmp_path / "nothing")


def test_a_scripts_optimizer_takes_its_settings_from_the_checkpoint(
    loop: Loop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by `load_state_dict`: what a script changed in the groups while it trained goes on."""
    loop("rows", 2, save=2)
    assert not caplog.messages
    model, optimizer, data = own_loop.make("rows")
    optimizer.param_groups[0] |= {"momentum": 0.5, "weight_decay": 0.1}
    given: dict[str, Any] = {"global_batch_size": own_loop.BATCH, "seed": own_loop.SEED}
    run = hetexp.setup(model, optimizer, data, run_dir=tmp_path / "other", **given)
    run.resume(tmp_path / "run")
    (group,) = optimizer.param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.0)
    (told,) = caplog.messages
    assert "checkpoint's momentum=0.9 (not 0.5), weight_decay=0 (not 0.1)" in told


def test_what_is_written(loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = loop("rows", 4, log_every=2)
    assert run.log(mine=0.5, other=torch.tensor(2)) == {"mine": 0.5, "other": 2.0}
    run.print("told", 1)
    assert capsys.readouterr().out == "told 1\n"
    assert (run.rank, run.world_size, run.is_main, str(run.device)) == (0, 1, True, "cpu")
    summary = run.finish()
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["samples"], summary["global_batch"]) == (4, 98, 32)
    assert summary["final"]["train_loss"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert lines[0]["train/samples"] == 64
    with pytest.raises(UsageError, match=r"run\.finish must be called once"):
        run.finish()


def test_evaluation() -> None:
    model, optimizer, data = own_loop.make("norm")
    run = hetexp.setup(model, optimizer, data, global_batch_size=7, eval_dataset=data)
    norm = model.get_submodule("1").eval()
    statistics = norm.get_buffer("running_mean").clone()

    def right(batch: Any) -> dict[str, torch.Tensor]:
        assert not torch.is_grad_enabled()
        assert not run.model.training
        inputs, targets = batch
        return {"right": (run.model(inputs).argmax(dim=1) == targets).sum()}

    result = run.evaluate(right)
    inputs, targets = data.tensors
    expected = int((model.eval()(inputs).argmax(dim=1) == targets).sum())
    assert result == {"right": expected / own_loop.SAMPLES, "samples": own_loop.SAMPLES}
    assert torch.equal(norm.get_buffer("running_mean"), statistics)
    assert model.training is False
    assert run.evaluate(lambda batch: {"one": 1, "count": 2}, TensorDataset(*data[:9]))["one"] == 0.5
    run.close(0)


def test_batches_of_any_kind_and_a_model_that_wants_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, *, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.linear(inputs).squeeze(1) - labels).square().mean()}

        def generate(self) -> str:
            return "a method of its own"

    model = Named()
    samples = [{"inputs": torch.randn(3), "labels": torch.tensor(1.0), "name": str(n)} for n in range(6)]
    run = hetexp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), samples, global_batch_size=4)  # type: ignore[arg-type]
    names: list[str] = []
    for batch in run.batches():
        names += batch.pop("name")
        run.backward(run.model(**batch)["loss"])
    assert sorted(names) == [str(n) for n in range(6)]
    assert run.model.generate() == "a method of its own"
    assert list(run.model.parameters())[0] is model.linear.weight


def small(**options: Any) -> tuple[hetexp.Run, torch.optim.Optimizer]:
    model, optimizer, data = own_loop.make("rows")
    return hetexp.setup(model, optimizer, data, global_batch_size=32, **options), optimizer


def test_backward_outside_of_a_batch() -> None:
    run, _ = small()
    with pytest.raises(UsageError, match=r"within a loop over run\.batches"):
        run.backward(torch.ones((), requires_grad=True))
    with pytest.raises(UsageError, match=r"run\.clip_norm must follow"):
        run.clip_norm(1.0)


def test_a_batch_without_backward() -> None:
    run, _ = small()
    batches = run.batches()
    next(batches)
    with pytest.raises(UsageError, match=r"must have its run\.backward"):
        next(batches)


def test_the_model_itself_is_called() -> None:
    run, _ = small()
    inputs, _ = next(run.batches())
    with pytest.raises(UsageError, match=r"run\.model was not called"):
        run.backward(run.model.module(inputs).sum())


def test_a_loss_that_is_none() -> None:
    run, _ = small()
    inputs, _ = next(run.batches())
    output = run.model(inputs)
    with pytest.raises(UsageError, match=r"its shape is \[32, 3\]"):
        run.backward(output)
    with pytest.raises(UsageError, match="depends on what"):
        run.backward(output.detach().sum())
    with pytest.raises(UsageError, match="`reduction` must be mean or sum"):
        run.backward(output.sum(), reduction="max")  # type: ignore[arg-type]
    run.backward(output.sum())
    with pytest.raises(UsageError, match="once for each batch"):
        run.backward(output.sum())


@pytest.mark.parametrize("count", [math.nan, -1, math.inf, torch.tensor(-0.5), "3", torch.ones(2)])
def test_a_count_that_is_no_number(count: Any) -> None:
    model, optimizer, data = own_loop.make("rows")
    run = hetexp.setup(model, optimizer, data, global_batch_size=32)
    inputs, targets = next(run.batches())
    with pytest.raises(UsageError, match="`count` must be a finite number from 0 on, but is "):
        run.backward(own_loop.mean_loss(run.model(inputs), targets), count=count)


def test_torchs_backward_in_place_of_the_runs() -> None:
    run, optimizer = small()
    inputs, _ = next(run.batches())
    run.model(inputs).sum().backward()
    with pytest.raises(UsageError, match=r"loss\.backward\(\) alone exchanges"):
        optimizer.step()


def test_accumulation_without_step_due() -> None:
    run, optimizer = small(accumulate=2)
    batches = run.batches()
    inputs, _ = next(batches)
    run.backward(run.model(inputs).sum())
    with pytest.raises(UsageError, match=r"`if run\.step_due:`"):
        optimizer.step()
    optimizer.zero_grad()
    inputs, _ = next(batches)
    loss = run.model(inputs).sum()
    with pytest.raises(UsageError, match="was cleared"):
        run.backward(loss)


def test_arguments_are_told_at_once() -> None:
    model, _, data = own_loop.make("rows")
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigError) as caught:
        hetexp.setup(
            model,
            optimizer,
            iter(data),  # type: ignore[arg-type]
            global_batch_size=0,
            accumulate=2,
            microbatch_size=4,
            num_workers=True,
            prefetch_factor=0,
            eval_dataset=TensorDataset(torch.ones(0)),
        )
    told = caught.value.problems
    assert len(told) == 7
    assert "`prefetch_factor` must be a whole number from 1 on, but is 0 instead." in told
    assert "`global_batch_size` must be a whole number from 1 on, but is 0 instead." in told
    assert "`num_workers` must be a whole number from 0 on, but is True instead." in told
    assert told[0].startswith("`accumulate` must be 1 if `microbatch_size` is given, but is 2")
    assert any(one.startswith("`dataset` must be a data set") for one in told)
    assert "`eval_dataset` must hold at least one sample, but is empty." in told
    assert "2 of its 2 are others" in told[-1]


def test_ranks_of_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SetupError, match="Start the script with `hetexp launch.*HETEXP_ENGINE=none"):
        small()
    monkeypatch.setenv("HETEXP_ENGINE", "none")
    small()


def test_a_model_that_a_device_cannot_compute() -> None:
    model, optimizer, data = own_loop.make("tokens")
    arc = DeviceSpec("xpu:0", "xpu", 0, "Arc", "intel", precisions=("float32", "bfloat16"))
    plan = plan_on([arc], unbuilt_config())
    begin_as(Launched(plan, 0, dist.HashStore(), lambda: None))
    try:
        with pytest.raises(ConfigError, match=r"is of float64 instead: xpu:0 \(Arc\)"):
            hetexp.setup(model, optimizer, data, global_batch_size=8)
    finally:
        begin_as(None)


def test_a_mean_over_nothing_moves_nothing(loop: Loop) -> None:
    losses = [loss for loss, _ in own_loop.plain_loop("tokens", 6)]
    assert math.isnan(losses[5])  # a tail batch without a label
    run, weights = loop("tokens", 6, log_every=1)
    assert all(value.isfinite().all() for value in weights[-1].values())
    run.close(0)


def test_a_script_names_a_shipped_collate_function(tmp_path: Path) -> None:
    model = nn.Embedding(5, 2)
    data: Any = [(torch.arange(1 + index % 3), torch.arange(1 + index % 3)) for index in range(6)]
    given: Any = (model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    with pytest.raises(ConfigError, match=r"`collate` must be a function, pad or list, but is 'pda'"):
        hetexp.setup(*given, global_batch_size=6, collate="pda")
    with pytest.raises(ConfigError, match="msak"):
        hetexp.setup(*given, global_batch_size=6, collate={"_target_": "pad", "msak": "mask"})
    run = hetexp.setup(*given, global_batch_size=6, collate={"_target_": "pad"}, run_dir=tmp_path / "run")
    for inputs, targets in run.batches():
        assert inputs.shape == targets.shape == (6, 3)
        assert int((targets == -100).sum()) == 6
        run.backward(run.model(inputs).sum(), count=(targets != -100).sum())


def test_backward_finds_the_model_s_outputs_freed(tmp_path: Path) -> None:
    class WithLogits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(inputs)
            self.logits = weakref.ref(logits)
            return {"logits": logits, "loss": logits.sum()}

    model = WithLogits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(8, 3))
    run = hetexp.setup(model, optimizer, data, global_batch_size=4, run_dir=tmp_path / "run")
    alive = []
    model.layer.bias.register_hook(lambda _: alive.append(model.logits() is not None))
    for (inputs,) in run.batches():
        run.backward(run.model(inputs)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    assert alive == [False, False]


def test_a_loop_without_batches() -> None:
    run, optimizer = small()
    next(run.model.parameters()).sum().backward()
    with pytest.raises(UsageError, match=r"for inputs, targets in run\.batches\(\)"):
        optimizer.step()


def test_a_loader_in_place_of_its_data() -> None:
    model, optimizer, data = own_loop.make("rows")
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4)
    with pytest.raises(ConfigError, match=r"Give its data set \(loader\.dataset\)"):
        hetexp.setup(model, optimizer, loader, global_batch_size=4)


def test_keys_of_a_dict_in_place_of_its_values() -> None:
    model, optimizer, data = own_loop.make("rows")
    rows = [{"inputs": inputs, "targets": targets} for inputs, targets in (data[n] for n in range(64))]
    run = hetexp.setup(model, optimizer, rows, global_batch_size=32)  # type: ignore[arg-type]
    for inputs, _ in run.batches():
        with pytest.raises(UsageError, match="the batch is a dict with inputs, targets"):
            run.model(inputs)
        break


@pytest.mark.parametrize(("mask", "lengths"), [(None, (2, 3)), ("mask", (2, 3)), (None, (3, 3))])
def test_padding_without_a_mask(
    recwarn: pytest.WarningsRecorder, mask: str | None, lengths: tuple[int, int]
) -> None:
    model, optimizer, _ = own_loop.make("rows")
    rows: Any = [{"tokens": torch.ones(length)} for length in lengths]
    collate = {"_target_": "pad", "mask": mask}
    run = hetexp.setup(model, optimizer, rows, global_batch_size=2, collate=collate)
    assert next(run.batches())["tokens"].shape == (2, 3)
    said = [warning for warning in recwarn if "makes no mask" in str(warning.message)]
    assert len(said) == (mask is None and lengths == (2, 3))
