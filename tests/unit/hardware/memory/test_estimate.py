"""The memory estimate against sums by hand, against what autograd really keeps, and by a card's rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hetexp.core.device import DeviceSpec
from hetexp.hardware.memory.convolution import Convolution
from hetexp.hardware.memory.estimate import (
    MemoryEstimate,
    Workload,
    estimate_memory,
    largest_microbatch,
    readable,
)
from hetexp.hardware.memory.functions import CardFunctions
from hetexp.hardware.memory.rules import MIB, MemoryRules, rules_for
from hetexp.hardware.memory.trace import cpu_block, cuda_block
from hetexp.model.convnet import ConvNet
from hetexp.model.gpt import GPT
from hetexp.model.mlp import MLP

CARD = MemoryRules(
    context_bytes=300 * MIB,
    workspace_bytes=8 * MIB,
    fragmentation=1.0,
    accelerator=True,
    foreach=True,
    fused_attention=True,
)
HOST = replace(CARD, context_bytes=0, workspace_bytes=0, accelerator=False, foreach=False)
"""Blocks of 64 bytes: sums by hand need no rounding."""


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=momentum)


def adamw(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, **more)


def squares(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, targets, reduction="sum")


def classes(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.float().flatten(0, -2), targets.flatten(), reduction="sum")


def work(model: nn.Module, inputs: Any, targets: Any, **more: Any) -> Workload:
    given: dict[str, Any] = {"build_optimizer": sgd, "loss": squares, **more}
    return Workload(model=model, sample=(inputs, targets), **given)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 128, bias=False))


def two_layer_work(**more: Any) -> Workload:
    return work(two_layers(), torch.rand(1, 256), torch.rand(1, 128), **more)


def tokens(length: int = 64, **more: Any) -> Workload:
    model = GPT(2, 4, 128, sequence_length=length, vocab_size=65, **more.pop("model", {}))
    sample = torch.zeros(1, length, dtype=torch.int64)
    return work(model, sample, sample, loss=classes, **more)


WEIGHTS = 4 * (256 * 512 + 512 * 128)
SCALAR = 64


def test_what_an_mlp_keeps_is_its_inputs_and_hidden_values() -> None:
    found = estimate_memory(two_layer_work(), 64, HOST)
    inputs, hidden, output = 4 * 64 * 256, 4 * 64 * 512, 4 * 64 * 128
    assert found.weights == found.gradients == WEIGHTS
    # The loss keeps output and targets; the sum of the loss is one number.
    assert found.phases["after_forward"] == inputs + hidden + 2 * output + SCALAR
    assert found.optimizer_state == 0
    assert found.reason is None


def test_activations_are_what_comes_on_top_of_all_gradients() -> None:
    """Gradients come while activations go: at most the first layer's gradient is not there at the peak."""
    found = estimate_memory(two_layer_work(), 64, HOST)
    assert found.activations == max(found.phases.values()) - WEIGHTS
    assert found.allocated_bytes == 2 * WEIGHTS + max(found.activations, found.update or 0)


def test_half_precision_casts_inputs_and_weights_and_keeps_weights_in_float32() -> None:
    found = estimate_memory(
        two_layer_work(precision="bfloat16", loss=lambda o, t: squares(o.float(), t)), 64, HOST
    )
    assert found.weights == found.gradients == WEIGHTS
    half_inputs, half_hidden, output = 2 * 64 * 256, 2 * 64 * 512, 4 * 64 * 128
    second_layer = 2 * 512 * 128  # cast; of the first one nobody needs the weight in backward
    half_output = output // 2  # a variable of the loop
    expected = half_inputs + half_hidden + second_layer + half_output + 2 * output + SCALAR
    assert found.phases["after_forward"] == expected


def test_float64_takes_twice_as_much() -> None:
    single = estimate_memory(two_layer_work(), 64, HOST)
    double = work(two_layers().double(), torch.rand(1, 256), torch.rand(1, 128), precision="float64")
    found = estimate_memory(double, 64, HOST)
    assert found.weights == 2 * single.weights
    assert found.phases["after_forward"] == 2 * (single.phases["after_forward"] - SCALAR) + SCALAR


def kept_for_backward(model: nn.Module, inputs: Any, loss: Callable[[Any], torch.Tensor]) -> int:
    """Bytes of the storages that autograd really saves on the CPU, beside weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = loss(model(inputs))
    del total
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("model", "inputs", "targets"),
    [
        (MLP((64, 64), (1, 8, 8), 10), torch.rand(32, 1, 8, 8), torch.zeros(32, dtype=torch.int64)),
        (
            ConvNet(input_shape=(1, 8, 8), num_classes=10),
            torch.rand(32, 1, 8, 8),
            torch.zeros(32, dtype=torch.int64),
        ),
        (
            GPT(2, 4, 64, 32, 65),
            torch.zeros(32, 32, dtype=torch.int64),
            torch.zeros(32, 32, dtype=torch.int64),
        ),
    ],
    ids=["mlp", "convnet", "gpt"],
)
def test_the_shipped_models_keep_what_autograd_keeps_on_real_tensors(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    found = estimate_memory(work(model, inputs, targets, loss=classes), 32, HOST)
    kept = kept_for_backward(model, inputs, lambda output: classes(output, targets))
    # Besides, logits and, for a card's attention, a padded log-sum-exp are held.
    assert kept <= found.phases["after_forward"] <= 1.06 * kept


def test_tied_weights_count_once_and_buffers_count() -> None:
    separate = tokens()
    tied = tokens(model={"tie_weights": True})
    difference = estimate_memory(separate, 2, HOST).weights - estimate_memory(tied, 2, HOST).weights
    assert difference == 4 * 65 * 128
    model = two_layers()
    model.register_buffer("table", torch.zeros(100, 16))
    found = estimate_memory(work(model, torch.rand(1, 256), torch.rand(1, 128)), 2, HOST)
    assert found.weights == WEIGHTS + 4 * 1600
    assert found.gradients == WEIGHTS


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    model = two_layers()
    model[0].weight.requires_grad_(False)
    trained = 4 * 512 * 128
    found = estimate_memory(
        work(model, torch.rand(1, 256), torch.rand(1, 128), build_optimizer=adamw), 64, HOST
    )
    assert found.weights == WEIGHTS
    assert found.gradients == trained
    assert found.optimizer_state == 2 * trained + 0 * SCALAR


def test_a_card_updates_all_parameters_at_once_and_the_host_one_after_another() -> None:
    kept = 4 * 64 * 128 + 512  # the output and the loss, variables of the loop
    card = estimate_memory(two_layer_work(build_optimizer=adamw), 64, CARD)
    assert card.optimizer_state == 2 * WEIGHTS
    assert card.update == WEIGHTS + kept
    host = estimate_memory(two_layer_work(build_optimizer=adamw), 64, HOST)
    largest = 4 * 256 * 512
    assert host.update == 2 * largest + 4 * 64 * 128 + SCALAR  # a root, and what it is divided by
    fused = estimate_memory(two_layer_work(build_optimizer=functools.partial(adamw, fused=True)), 64, CARD)
    assert (fused.optimizer_state, fused.update) == (2 * WEIGHTS, kept)


def test_momentum_is_state_without_temporaries() -> None:
    found = estimate_memory(two_layer_work(build_optimizer=functools.partial(sgd, momentum=0.9)), 64, CARD)
    assert found.optimizer_state == WEIGHTS
    assert found.update == 4 * 64 * 128 + 512


def test_workspace_is_of_both_threads_that_multiply_and_only_of_those() -> None:
    assert estimate_memory(two_layer_work(), 4, CARD).workspace == 16 * MIB
    scale = nn.LayerNorm(128)
    assert estimate_memory(work(scale, torch.rand(1, 128), torch.rand(1, 128)), 4, CARD).workspace == 0


def test_attention_of_a_card_keeps_no_scores() -> None:
    length, samples = 512, 2
    fused = estimate_memory(tokens(length), samples, CARD)
    scores = estimate_memory(tokens(length), samples, replace(CARD, fused_attention=False))
    assert fused.activations is not None
    assert scores.activations is not None
    of_both_layers = 2 * 4 * samples * 4 * length * length
    assert scores.activations - fused.activations > 0.9 * of_both_layers
    assert estimate_memory(tokens(length, precision="bfloat16"), samples, CARD).measured


@pytest.mark.parametrize("size", [40, 6])  # no multiple of 8, and none of 4: no kernel takes it
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "float64"])
def test_attention_runs_with_every_head_size_and_precision(size: int, precision: str) -> None:
    model = GPT(1, 2, 2 * size, sequence_length=16, vocab_size=7, dropout=0.1)
    sample = torch.zeros(1, 16, dtype=torch.int64)
    if precision == "float64":
        model.double()
    found = estimate_memory(work(model, sample, sample, loss=classes, precision=precision), 3, CARD)
    assert found.reason is None
    assert found.activations


def test_masks_and_torchs_own_attention_layer_run() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(8, 8, dtype=torch.bool, device=inputs.device).triu(1)
            out: torch.Tensor = self.layer(inputs, src_mask=mask)
            return out

    for precision in ("float32", "bfloat16"):
        made = work(Masked(), torch.rand(1, 8, 32), torch.rand(1, 8, 32), precision=precision)
        assert estimate_memory(made, 2, CARD).reason is None


def test_dropout_keeps_a_byte_a_value() -> None:
    plain = nn.Sequential(nn.Linear(64, 4096, bias=False), nn.ReLU())
    dropping = nn.Sequential(*plain, nn.Dropout(0.5))
    with_, without = (
        estimate_memory(work(m, torch.rand(1, 64), torch.rand(1, 4096)), 32, HOST).phases["after_forward"]
        for m in (dropping, plain)
    )
    values = 32 * 4096
    assert with_ - without == values + 4 * values  # the mask, and the result, which ReLU's does not replace


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x @ x, torch.bfloat16),
        (lambda x: functional.linear(x, x), torch.bfloat16),
        (lambda x: torch.einsum("ij,jk->ik", x, x), torch.bfloat16),
        (lambda x: torch.softmax(x @ x, -1), torch.float32),
        (lambda x: (x @ x).softmax(-1, dtype=torch.bfloat16), torch.bfloat16),
        (lambda x: functional.layer_norm(x @ x, (8,)), torch.float32),
        (lambda x: functional.group_norm((x @ x)[None], 2), torch.float32),
        (lambda x: functional.cross_entropy(x @ x, torch.zeros(8, dtype=torch.int64)), torch.float32),
        (lambda x: functional.mse_loss(x @ x, x), torch.float32),
        (lambda x: (x @ x) ** 2, torch.float32),
        (lambda x: (x @ x).sum(), torch.float32),
        (lambda x: functional.gelu(x @ x), torch.bfloat16),
        (lambda x: x @ x + x, torch.float32),
        (lambda x: torch.dot(x[0].bfloat16(), x[0]), torch.float32),
        (lambda x: functional.conv2d(x[None, None], x[None, None]), torch.bfloat16),
        (lambda x: x.double() @ x.double(), torch.float64),
        (lambda x: x.unflatten(0, (2, 4)).norm(), torch.float32),
    ],
)
def test_casts_are_those_of_torchs_autocast_on_cuda(
    call: Callable[[torch.Tensor], torch.Tensor], expected: torch.dtype
) -> None:
    """By the lists in torch's documentation of `torch.amp`; the functions cast on any device."""
    with CardFunctions("bfloat16", fused_attention=True):
        assert call(torch.rand(8, 8)).dtype == expected


def test_a_weight_is_cast_once_until_the_context_ends() -> None:
    functions, weight = CardFunctions("bfloat16", True), nn.Parameter(torch.rand(8, 8))

    def cast() -> Any:
        """The node in which the weight was cast, from the transposed weight that the product took."""
        product: Any = functional.linear(torch.rand(8, 8), weight).grad_fn
        return product.next_functions[-1][0].next_functions[0][0]

    with functions:
        first = cast()
        assert cast() is first
        functions.forget()
        assert cast() is not first


def test_accumulation_holds_gradients_and_the_output_before() -> None:
    once = estimate_memory(two_layer_work(), 64, HOST)
    twice = estimate_memory(two_layer_work(accumulates=True), 64, HOST)
    assert once.activations is not None
    assert twice.activations is not None
    # At the end of the second forward pass all gradients are there already, and the first output still is.
    forward = once.phases["forward"] + 4 * 64 * 128 + WEIGHTS
    assert twice.phases["forward"] == pytest.approx(forward, abs=4 * SCALAR)
    assert twice.activations > once.activations


def test_a_strategy_that_keeps_gradients_and_buckets() -> None:
    def buckets(gradients: int, accumulates: bool) -> int:
        return gradients if accumulates else 0

    alone = estimate_memory(two_layer_work(), 64, HOST)
    kept = estimate_memory(two_layer_work(keeps_gradients=True, bucket_bytes=buckets), 64, HOST)
    assert (kept.gradients, kept.buckets) == (WEIGHTS, 0)
    assert kept.allocated_bytes > alone.allocated_bytes
    twice = two_layer_work(keeps_gradients=True, bucket_bytes=buckets, accumulates=True)
    assert estimate_memory(twice, 64, HOST).buckets == WEIGHTS


def test_an_empty_share_has_gradients_and_state_and_nothing_else() -> None:
    found = estimate_memory(two_layer_work(build_optimizer=adamw), 0, CARD)
    assert found.gradients == WEIGHTS
    assert found.optimizer_state == 2 * WEIGHTS
    assert (found.activations, found.workspace, found.reason) == (0, 0, None)


class Reads(nn.Module):
    """Reads a value, which a tensor without memory has not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs)
        return out * 2 if out.sum().item() > 0 else out


def test_a_model_that_reads_values_gets_what_is_certain_and_the_reason() -> None:
    model = Reads()
    found = estimate_memory(work(model, torch.rand(1, 16), torch.rand(1, 16), build_optimizer=adamw), 8, CARD)
    assert (found.activations, found.measured) == (None, False)
    assert found.reason is not None
    assert "item" in found.reason
    assert found.gradients == 1024 + 512  # 16 × 16 and 16 numbers, in blocks of 512 bytes
    assert found.optimizer_state == 2 * (1024 + 512)
    assert found.explain().startswith("at least ")
    with pytest.raises(ValueError, match="item"):
        largest_microbatch(work(model, torch.rand(1, 16), torch.rand(1, 16)), MIB, CARD, 8)


def test_a_loss_that_uses_numpy_gets_the_reason() -> None:
    made = two_layer_work(loss=lambda output, targets: torch.tensor(output.detach().numpy().sum()))
    found = estimate_memory(made, 8, CARD)
    assert not found.measured
    assert found.reason


def test_an_optimizer_that_wants_a_closure_leaves_activations_known() -> None:
    found = estimate_memory(
        two_layer_work(build_optimizer=lambda m: torch.optim.LBFGS(m.parameters())), 8, CARD
    )
    assert found.activations is not None
    assert (found.optimizer_state, found.update, found.measured) == (None, None, False)
    assert found.reason is not None
    assert "optimizer" in found.reason


def test_a_module_that_cannot_be_copied_still_has_weights() -> None:
    model = two_layers()
    model.handle = (line for line in "ab")  # type: ignore[assignment]  # generators cannot be copied
    found = estimate_memory(work(model, torch.rand(1, 256), torch.rand(1, 128)), 8, CARD)
    assert (found.weights, found.gradients, found.measured) == (WEIGHTS, WEIGHTS, False)


def test_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)).eval()
    model[0].weight.grad = torch.ones(16, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = work(model, torch.rand(1, 16), torch.rand(1, 16))
    random = torch.get_rng_state()
    with torch.no_grad():  # whoever asks may be inside of it
        found = estimate_memory(made, 8, CARD)
    assert found.measured
    assert not any(module.training for module in model.modules())
    assert torch.equal(model[0].weight.grad, torch.ones(16, 16))
    assert model[0].bias.grad is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_without_memory_can_be_asked_twice() -> None:
    with torch.device("meta"):
        model = two_layers()
    made = work(model, torch.rand(1, 256), torch.rand(1, 128))
    assert estimate_memory(made, 64, CARD) == estimate_memory(made, 64, CARD)
    assert all(p.grad is None for p in model.parameters())


def test_inputs_and_outputs_may_be_dicts() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 64)

        def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.table(tokens) * scale[:, None, None]}

    sample = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "scale": torch.rand(1, dtype=torch.float64)}
    made = work(Named(), sample, torch.rand(1, 8, 64), loss=lambda out, targets: squares(out["out"], targets))
    found = estimate_memory(made, 16, HOST)
    assert found.reason is None
    assert found.activations


def test_checkpointing_keeps_less_in_either_precision() -> None:
    class Deep(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            layers = [
                nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(6)
            ]
            self.layers, self.again = nn.ModuleList(layers), again

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False) if self.again else layer(hidden)
            return hidden

    for precision in ("float32", "bfloat16"):
        plain, again = (
            estimate_memory(
                work(
                    Deep(flag),
                    torch.rand(1, 64),
                    torch.rand(1, 64),
                    precision=precision,
                    loss=lambda output, targets: squares(output.float(), targets),
                ),
                4096,
                HOST,
            )
            for flag in (False, True)
        )
        assert plain.reason is None
        assert again.reason is None
        assert again.allocated_bytes < 0.6 * plain.allocated_bytes


@pytest.mark.parametrize("capacity_mib", [3, 5, 17])
def test_the_largest_microbatch_fits_and_one_more_does_not(capacity_mib: int) -> None:
    made = tokens(32, build_optimizer=adamw)
    rules = replace(CARD, context_bytes=0, workspace_bytes=0)
    capacity = estimate_memory(made, 1, rules).total_bytes + capacity_mib * MIB
    largest = largest_microbatch(made, capacity, rules, 10_000)
    assert largest is not None
    assert estimate_memory(made, largest, rules).total_bytes <= capacity
    assert estimate_memory(made, largest + 1, rules).total_bytes > capacity


def test_the_largest_microbatch_at_the_ends() -> None:
    made = two_layer_work()
    assert largest_microbatch(made, 2**40, CARD, 100) == 100
    assert largest_microbatch(made, WEIGHTS, CARD, 100) is None
    assert largest_microbatch(made, WEIGHTS, CARD, 1) is None


def test_the_largest_microbatch_of_a_model_that_refuses_one_sample() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    made = work(model, torch.rand(1, 64), torch.rand(1, 64))
    capacity = estimate_memory(made, 50, HOST).total_bytes
    largest = largest_microbatch(made, capacity, HOST, 1000)
    assert largest is not None
    assert 50 <= largest < 60


def convolutions(*layers: nn.Module, precision: str = "float32", cudnn: bool = True) -> MemoryEstimate:
    """256 channels of 56 × 56 pixels, 32 samples."""
    made = work(nn.Sequential(*layers), torch.rand(1, 256, 56, 56), torch.rand(1, 1), precision=precision)
    made = replace(made, loss=lambda output, _: output.float().sum())
    return estimate_memory(made, 32, replace(CARD, cudnn=cudnn))


def test_what_cudnn_takes_where_there_is_plenty_is_said_and_not_asked_for() -> None:
    def layer() -> nn.Conv2d:
        return nn.Conv2d(256, 256, 3, padding=1, bias=False)

    plain, plenty = (convolutions(layer(), layer(), cudnn=cudnn) for cudnn in (False, True))
    assert plain.spared == 0
    assert plenty.total_bytes == plain.total_bytes
    assert plenty.least_bytes == plain.allocated_bytes
    # At the peak: inputs and both outputs, and the weights' gradients do not yet exist.
    forward = Convolution(32, 256, 256, 56, 56).forward_bytes()
    values, weights = 4 * 32 * 256 * 56 * 56, 4 * 9 * 256 * 256
    held = 2 * weights + 3 * values + cuda_block(forward)
    assert plenty.allocated_bytes == pytest.approx(held, abs=2 * MIB)


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(256, 256, 3, padding=1, bias=False, groups=2),
        nn.Conv2d(256, 256, 3, padding=1, bias=False, stride=2),
        nn.Conv2d(256, 256, 3, padding=2, bias=False, dilation=2),
        nn.Conv2d(256, 256, 3, bias=False),
        nn.Conv2d(256, 256, 5, padding=2, bias=False),
        nn.ConvTranspose2d(256, 256, 3, padding=1, bias=False),
        nn.Sequential(nn.Flatten(2), nn.Conv1d(256, 256, 3, padding=1, bias=False)),
    ],
)
def test_what_cudnn_takes_for_other_convolutions_is_not_known(other: nn.Module) -> None:
    found = convolutions(other)
    assert (found.spared, found.reason) == (0, None)
    assert found.activations


def test_half_precision_is_laid_out_anew_and_needed() -> None:
    half = convolutions(nn.Conv2d(256, 256, 3, padding=1, bias=False), precision="bfloat16")
    assert half.spared == 0
    values = 2 * 32 * 256 * 56 * 56
    # The inputs in both types, the output, and both once more.
    assert half.phases["forward"] == pytest.approx(2 * values + 4 * values, rel=0.02)


def test_sums_and_words() -> None:
    found = MemoryEstimate(
        microbatch_size=4,
        weights=100 * MIB,
        gradients=100 * MIB,
        optimizer_state=200 * MIB,
        buckets=50 * MIB,
        activations=300 * MIB,
        update=100 * MIB,
        workspace=64 * MIB,
        context_bytes=500 * MIB,
        fragmentation=1.5,
        spared=70 * MIB,
    )
    assert found.least_bytes == (100 + 100 + 200 + 50 + 300 + 64) * MIB
    assert found.allocated_bytes == found.least_bytes + 70 * MIB
    assert found.total_bytes == (814 + 407 + 500) * MIB
    assert sum(found.parts().values()) == found.total_bytes
    assert found.explain() == (
        "1.68 GiB for 4 samples at once (weights 100.0 MiB, gradients 100.0 MiB, optimizer state 0.20 GiB, "
        "buckets 50.0 MiB, activations 0.29 GiB, workspace 64.0 MiB, driver 0.49 GiB, fragmentation 0.40 GiB)"
    )
    assert "update 0.39 GiB" in replace(found, update=400 * MIB).explain()
    assert "for 1 sample (" in replace(found, microbatch_size=1).explain()
    assert readable(2048) == "2.0 KiB"


def test_blocks() -> None:
    assert [cuda_block(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert cuda_block(5 * MIB) == 5 * MIB
    assert cuda_block(11 * MIB) == 12 * MIB  # a rest of 1 MiB stays with the block
    assert cuda_block(11 * MIB - 512) == 11 * MIB - 512
    assert [cpu_block(n) for n in (1, 64, 65)] == [64, 64, 128]


def test_headroom_is_for_cards() -> None:
    assert replace(CARD, fragmentation=1.15).with_headroom().fragmentation == pytest.approx(1.25, abs=0.01)
    assert HOST.with_headroom() == HOST


def device(vendor: str, architecture: str | None = None) -> DeviceSpec:
    return DeviceSpec("x:0", "x", 0, "Some card", vendor, architecture=architecture)


def test_rules_of_devices() -> None:
    older = (8192 + 128) * 1024
    assert rules_for(device("nvidia", "sm_86")).workspace_bytes == older
    assert rules_for(device("nvidia", "sm_90")).workspace_bytes == 32 * MIB
    assert rules_for(device("nvidia", "sm_120")).workspace_bytes == 32 * MIB
    assert rules_for(device("nvidia")).workspace_bytes == 32 * MIB  # not known: the larger one is safe
    assert rules_for(device("amd", "gfx942")).workspace_bytes == 128 * MIB
    assert rules_for(device("amd", "gfx1100")).workspace_bytes == 32 * MIB
    assert not rules_for(device("intel")).fused_attention
    assert not rules_for(device("apple")).foreach
    assert not rules_for(device("cpu")).accelerator
    assert [v for v in ("nvidia", "amd", "intel", "apple", "cpu") if rules_for(device(v)).cudnn] == ["nvidia"]
