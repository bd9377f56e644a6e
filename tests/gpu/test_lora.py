"""Adapters of a language model on a real card: beside the CPU as on one device, and 8B in 4 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support import Train, worst

pytest.importorskip("transformers")
pytest.importorskip("peft")

from language_model import architecture, override

from hetexp.app import compose_config
from hetexp.core.instantiate import instantiate
from hetexp.model.hf_causal_lm import HFCausalLM
from hetexp.model.recompute import recompute_layers

STEPS = 20
COMMON = (
    "model=hf_causal_lm",
    "model.rank=2",
    override(architecture("starcoder2")),  # in float64 but for angles
    "data=sft_jsonl",
    "data.max_length=80",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=16",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
    "trainer.precision=float64",
    "optimizer.lr=0.01",
)
LAYOUTS = {
    "stages": ("strategy=pipeline", "strategy.num_microbatches=4", "strategy.shard_plan=[[0,3],[3,5]]"),
    "shares": ("strategy=ddp", "balancing=manual", "balancing.weights=[3,1]"),
}
NEEDED_GIB = 32
"""While the weights are drawn on the card, before they are in 4 bits."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_card_and_the_cpu(train: Train, layout: str) -> None:
    """No further from one device than one kind of device is from the other.

    transformers computes angles of rotary embeddings in float32, whose sines differ between a card and a CPU
    in the last bit.
    """
    card = train(*COMMON, "hardware.devices=[cuda:0]", "strategy=single")
    cpu = train(*COMMON, "hardware.devices=[cpu]", "strategy=single")
    run = train(*COMMON, "hardware.devices=[cuda:0,cpu]", *LAYOUTS[layout])
    (loss, parameters), usual = worst(run, card, STEPS), worst(cpu, card, STEPS)
    print(f"{layout}: loss {loss:.2e}, parameters {parameters:.2e}; the CPU's {usual[0]:.2e}, {usual[1]:.2e}")
    assert loss <= max(1e-12, 2 * usual[0])
    assert parameters <= max(1e-11, 2 * usual[1])
    assert usual[0] < 1e-8


def test_8b_in_four_bits() -> None:
    """Random weights of Llama 3.1 8B's shape: a step trains adapters, in the memory that was foretold."""
    pytest.importorskip("bitsandbytes")
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < NEEDED_GIB:
        pytest.skip(f"needs {NEEDED_GIB} GiB free, found {free:.0f}")
    section: Any = OmegaConf.to_container(compose_config(["experiment=lora_8b"])["model"], resolve=True)
    with torch.device("cuda"):
        model = instantiate(section)
    assert isinstance(model, HFCausalLM)
    recompute_layers(model.to(torch.float32))
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated() / 2**30
    print(f"weights {held:.2f} GiB")
    assert held == pytest.approx(5.5, rel=0.1)  # what `hetexp plan` says of weights
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    tokens = torch.randint(3, 128000, (1, 513), device="cuda")
    losses = []
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            output = model(tokens[:, :-1]).float().flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(output, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"losses {losses}, peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    assert losses == sorted(losses, reverse=True)
