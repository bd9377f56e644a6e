"""S15: adapters of a frozen language model, trained in stages or unequal shares, equal one device's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import Run, Train, worst

pytest.importorskip("transformers")
pytest.importorskip("peft")

from language_model import architecture, override, saved_base, write_lines

from hetexp.cli import main
from hetexp.model.hf_causal_lm import HFCausalLM

pytestmark = pytest.mark.timeout(300)  # each rank imports transformers where the server has not
STEPS = 20
COMMON = (
    "model=hf_causal_lm",
    "model.rank=2",
    "data=sft_jsonl",
    "data.max_length=80",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=16",  # of 58 lines: the fourth batch of an epoch has 10
    "trainer.clip_norm=1",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
    "optimizer.lr=0.01",
)
ONE = ("hardware=cpu", "strategy=single")
THREE_VENDORS = (
    "hardware.devices=[emulated:rtx_3090,emulated:arc_a770,emulated:rx_7900_xtx]",
    "hardware.time_scale=1",  # not paced: nobody asks how long it took
    "strategy=pipeline",
    "strategy.num_microbatches=4",
    "strategy.shard_plan=[[0,1],[1,2],[2,5]]",
)
UNEQUAL = (
    "hardware.devices=[cpu,cpu]",
    "strategy=ddp",
    "balancing=manual",
    "balancing.weights=[3,1]",
)
# Its norms compute in the run's own type; Llama's in float32, whatever the run does.
EXACT = override(architecture("starcoder2"))


def logits_of(run: Run, base: Path, adapter: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what hetexp's model and peft's make of the same tokens."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ours = HFCausalLM(folder=str(base), rank=2)
    ours.load_state_dict(run.parameters())
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    )
    with torch.no_grad():
        return ours(tokens), theirs(input_ids=tokens).logits


def test_three_vendors_in_stages_and_their_adapter_in_peft(train: Train, tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", tie_word_embeddings=True)
    common = (*COMMON, "trainer.precision=float32", f"model.folder={base}")
    reference = train(*ONE, *common)
    staged = train(*THREE_VENDORS, *common)
    loss, parameters = worst(staged, reference, STEPS)
    print(f"loss {loss:.2e}, parameters {parameters:.2e}")
    assert loss <= 1e-6
    assert parameters <= 1e-5
    assert reference.losses[-1] < 0.97 * reference.losses[0]
    found, expected = (run.summary["final"]["eval"] for run in (staged, reference))
    assert found == pytest.approx(expected, rel=1e-6)
    names = {device["name"] for device in staged.summary["devices"]}
    assert len(names) == 3

    assert main(["export", str(staged.folder), "--output", str(tmp_path / "adapter")]) == 0
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 5 * 7 * 2  # of all stages: two factors for each linear layer
    tokens = torch.randint(3, 259, (2, 40), generator=torch.Generator().manual_seed(1))
    ours, theirs = logits_of(staged, base, tmp_path / "adapter", tokens)
    assert torch.equal(ours, theirs)
    with torch.no_grad():
        untrained = HFCausalLM(folder=str(base), rank=2)(tokens)
    assert not torch.allclose(ours, untrained, atol=1e-2)


def test_float64_steps_equal_one_device(train: Train) -> None:
    """Stages that compute activations again, and shares of 3:1, each microbatch padded by itself."""
    common = (*COMMON, "trainer.precision=float64", EXACT, "model.vocab_size=259")
    reference = train(*ONE, *common)
    layouts = {
        "stages": (
            "hardware.devices=[cpu,cpu,cpu]",
            *THREE_VENDORS[2:],
            "trainer.activation_checkpointing=true",
        ),
        "shares": UNEQUAL,
        "shares in pieces": (*UNEQUAL, "trainer.accumulate=3"),
    }
    for name, layout in layouts.items():
        loss, parameters = worst(train(*common, *layout), reference, STEPS)
        print(f"{name}: loss {loss:.2e}, parameters {parameters:.2e}")
        assert loss <= 1e-12, name
        assert parameters <= 1e-12, name


def test_only_adapters_are_exchanged_and_saved(train: Train) -> None:
    """Case 46: frozen weights are no bytes on the wire and none in a checkpoint."""
    short = (*COMMON, "trainer.precision=float32", override(architecture()), "trainer.max_steps=2")
    run = train(*short, *UNEQUAL)
    saved = run.parameters()
    assert all("lora_" in name for name in saved)
    count = sum(tensor.numel() for tensor in saved.values())
    assert run.summary["comm"]["bytes_per_step"] == 4 * count
    moments = load_file(sorted((run.folder / "checkpoints").iterdir())[-1] / "optimizer.safetensors")
    assert sum(t.numel() for t in moments.values() if t.dim()) == 2 * count
    resumed = train(*short, *UNEQUAL, "trainer.max_steps=4", f"resume={run.folder}")
    whole = train(*short, *ONE, "trainer.max_steps=4")
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-6)


def test_a_rank_with_ignored_labels_only(train: Train, tmp_path: Path) -> None:
    """Case 2: 90 labels on one rank, 10 on the other, and then none: the mean is one over all that count."""
    lines = [{"prompt": "", "completion": "x" * 89}, {"prompt": "y" * 60, "completion": "z" * 9}]
    file = write_lines(tmp_path / "lines.jsonl", lines)
    common = (
        *COMMON[:3],
        EXACT,
        f"data.file={file}",
        "data.test_fraction=0",
        "data.max_length=100",
        "trainer.max_steps=3",
        "trainer.max_epochs=null",
        "trainer.global_batch_size=2",
        "trainer.log_every=1",
        "trainer.checkpoint_every=1",
        "trainer.precision=float64",
        "optimizer.lr=0.01",
    )
    shorter = ("data.max_length=40", "data.unanswered=keep")  # cuts the second line's answer off
    for options in ((), shorter):
        reference = train(*ONE, *common, *options)
        halves = train("hardware.devices=[cpu,cpu]", "strategy=ddp", *common, *options)
        loss, parameters = worst(halves, reference, 3)
        assert loss <= 1e-12
        assert parameters <= 1e-12
