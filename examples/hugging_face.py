"""A Hugging Face language model, made from a configuration, that learns the bytes of this very file.

    pip install transformers
    python examples/hugging_face.py
    hetexp launch examples/hugging_face.py hardware=nvidia_arc

Nothing is downloaded. A batch is a dict, so that the model gets it by names; `run.model` has its methods.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import hetexp

LENGTH = 64


class Bytes(Dataset):
    """Every window of so many bytes of a file."""

    def __init__(self, path):
        self.bytes = torch.tensor(list(path.read_bytes()))

    def __len__(self):
        return len(self.bytes) - LENGTH

    def __getitem__(self, index):
        window = self.bytes[index : index + LENGTH]
        return {"input_ids": window, "labels": window}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2 * LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = hetexp.setup(model, optimizer, Bytes(Path(__file__)), global_batch_size=32)
    while run.step < options.steps:
        for batch in run.batches():
            loss = run.model(**batch).loss
            run.backward(loss)  # every window has as many bytes: a mean over samples is one over bytes
            optimizer.step()
            optimizer.zero_grad()
            if run.step % 20 == 0:
                run.print(f"step {run.step}: loss {run.log(loss=loss)['loss']:.4f}")
            if run.step == options.steps:
                break
    if run.is_main:
        model.eval()
        start = torch.tensor([list(b"import ")], device=run.device)
        told = run.model.generate(start, max_new_tokens=24, do_sample=False, pad_token_id=0)
        print(repr(bytes(told[0].tolist()).decode(errors="replace")), flush=True)


if __name__ == "__main__":
    main()
