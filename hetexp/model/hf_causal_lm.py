"""Any decoder-only language model of Hugging Face transformers, trained by low-rank adapters (LoRA)."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from hetexp.core.errors import ConfigError, must_be
from hetexp.model import adapters
from hetexp.model.base import unknown
from hetexp.model.decoder import (
    EMBEDDING,
    HEAD,
    LAYERS,
    NORM,
    ROTARY,
    Decoder,
    answers,
    base_name,
    why_not_cut,
)
from hetexp.model.exported import Exported
from hetexp.model.four_bit import Kind, keep_in_four_bits
from hetexp.model.layered import Pieces
from hetexp.torch_private import to_arguments

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Architecture of the model if neither a folder nor an architecture is given."""
DType = Literal["float32", "bfloat16", "float16"]


class HFCausalLM(nn.Module):
    """Predicts the next token; of its weights only low-rank adapters are trained (Hu et al. 2021).

    Everything else, the base, is frozen: it has no gradient and no moments, is never exchanged, and no
    checkpoint holds it. Ranks build the same base from the same folder, or from the same random numbers.

    Samples are padded at their end. A causal model needs no mask for it: no token sees later tokens.

    Args:
        folder: folder of a Hugging Face model, with `config.json` and weights, as `save_pretrained` writes
            them.
        architecture: content of `config.json` without a folder: `{model_type: llama, hidden_size: 64, …}`;
            `None`: a small Llama. The base then starts at random weights.
        vocab_size: number of tokens of `architecture`; `None`: the data's.
        rank: rank of the adapters, which are the only trained weights.
        alpha: scale of the adapters: their output is multiplied by `alpha / rank`.
        dropout: chance to drop a value of an adapter's input.
        targets: linear layers with an adapter: `all-linear` (all but the head), or names (`[q_proj,v_proj]`).
        four_bit: 4-bit type of the base's linear layers but the head, by bitsandbytes; `None`: not in 4 bits.
        base_dtype: type of the base's other weights; `None`: that of the run.
        attention: how transformers computes attention.

    Raises:
        ConfigError: the folder holds no such model, or nothing in it has one of the names.
        SetupError: `four_bit` if bitsandbytes does not load.
    """

    def __init__(
        self,
        folder: str | None = None,
        architecture: dict[str, Any] | None = None,
        vocab_size: PositiveInt | None = None,
        rank: PositiveInt = 8,
        alpha: PositiveFloat = 16,
        dropout: Annotated[NonNegativeFloat, Field(lt=1)] = 0.0,
        targets: Literal["all-linear"] | list[str] = "all-linear",
        four_bit: Kind | None = None,
        base_dtype: DType | None = None,
        attention: Literal["sdpa", "eager"] = "sdpa",
    ) -> None:
        super().__init__()
        if problems := self.check(folder, architecture, targets, attention):
            raise ConfigError(problems)
        self.base_dtype = getattr(torch, base_dtype) if base_dtype is not None else None
        # Adapters begin alike on all ranks, however many random numbers the base has taken.
        seed = int(torch.randint(2**62, (), device="cpu"))
        dtype = self.base_dtype or torch.float32
        self.lm = _base(folder, architecture, vocab_size, dtype, attention)
        self.lm.requires_grad_(False)
        if four_bit is not None:
            keep_in_four_bits(getattr(self.lm, base_name(self.lm)), four_bit, dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapters.attach(self.lm, rank, alpha, dropout, targets)
        self._uncut = why_not_cut(self.lm)
        self._decoder = Decoder(self.lm) if self._uncut is None else None
        adapters.keep_trained_only(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, seq, vocab_size] of tokens [batch, seq], int64."""
        with answers(tokens):
            logits: Tensor = self.lm(input_ids=tokens, use_cache=False).logits
        return logits

    def pieces(self) -> Pieces:
        """Return where the model may be cut (`hetexp.model.layered`): between its decoder's layers.

        Raises:
            ConfigError: its architecture has unusual parts.
        """
        if self._decoder is None:
            raise ConfigError(
                "`model` must be an architecture with the parts of Llama (embed_tokens, layers, norm, "
                f"lm_head) to be cut into stages, but {self._uncut}. strategy=ddp trains it whole."
            )
        base = getattr(self.lm, base_name(self.lm))
        path = f"lm.{base_name(self.lm)}"
        return Pieces(
            layer_names=tuple(f"{path}.{LAYERS}.{index}" for index in range(len(base.layers))),
            begin_names=(f"{path}.{EMBEDDING}",),
            finish_names=(f"{path}.{NORM}", f"lm.{HEAD}"),
            shared_names=(f"{path}.{ROTARY}",) if hasattr(base, ROTARY) else (),
            begin=self._decoder.begin,
            finish=self._decoder.finish,
            uniform=True,
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the model; a base with a type of its own keeps it, and adapters are never half."""
        device, dtype, non_blocking = to_arguments(*args, **kwargs)
        if dtype is None or self.base_dtype is None:
            return super().to(*args, **kwargs)
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
        return self if device is None else super().to(device, non_blocking=non_blocking)

    def constant_names(self) -> list[str]:
        """Return the parameters and buffers that stay equal on all ranks and need not be sent."""
        frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]
        return frozen + [name for name, _ in self.named_buffers()]

    def facts(self) -> dict[str, Any]:
        """Return a hash of some numbers of each frozen tensor, which differs between bases."""
        digest = hashlib.sha256()
        for name, tensor in self.named_parameters():
            if tensor.is_floating_point() and not tensor.requires_grad and not tensor.is_meta:
                some = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 64)][:64]
                digest.update(name.encode() + some.double().cpu().numpy().tobytes())
        return {"base": digest.hexdigest()[:12]}

    @staticmethod
    def exported(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Exported:
        """Return a checkpoint's tensors as peft reads an adapter."""
        return adapters.exported(state["extra"]["config"]["model"], tensors)

    @staticmethod
    def check(
        folder: str | None = None,
        architecture: dict[str, Any] | None = None,
        targets: str | list[str] = "all-linear",
        attention: str = "sdpa",
        **_: Any,
    ) -> list[str]:
        """Return the problems of the arguments and of missing libraries, one sentence each."""
        problems = []
        missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
        if missing:
            problems.append(
                f"`model` hf_causal_lm needs {' and '.join(missing)}, not installed here: "
                "pip install 'hetexp[lora]'."
            )
        if folder is not None:
            if not Path(folder).expanduser().joinpath("config.json").is_file():
                problems.append(must_be("model.folder", "a folder with a model's config.json", folder))
        elif architecture is not None and "model_type" not in architecture:
            accepted = "a configuration with a model_type"
            problems.append(must_be("model.architecture", accepted, architecture))
        if isinstance(targets, list) and not targets:
            problems.append(must_be("model.targets", "all-linear or at least one name", targets))
        if attention not in ("sdpa", "eager"):  # transformers takes other words for code to download
            problems.append(must_be("model.attention", "sdpa or eager", attention))
        return problems


def _base(
    folder: str | None,
    architecture: dict[str, Any] | None,
    vocab_size: int | None,
    dtype: torch.dtype,
    attention: str,
) -> Any:
    """Build the language model, with its weights unless tensors are made without data here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # Otherwise transformers may ask on the terminal whether to run code of the folder.
    options = {"attn_implementation": attention, "trust_remote_code": False}
    try:
        if folder is not None:
            path = str(Path(folder).expanduser())
            if torch.empty(0).is_meta:
                config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
                lm = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
            else:
                lm = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype, **options)
            _check_vocabulary(lm, vocab_size)
        else:
            given = dict(SMALL if architecture is None else architecture)
            given.setdefault("vocab_size", vocab_size)
            if given["vocab_size"] is None:
                raise ConfigError(unknown(vocab_size=None))
            config = AutoConfig.for_model(**given)
            lm = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        key, value = ("folder", folder) if folder is not None else ("architecture", architecture)
        reason = str(error).strip().partition("\n")[0]
        accepted = "a decoder-only model that transformers knows"
        raise ConfigError(must_be(f"model.{key}", accepted, value, reason)) from error
    lm.config.use_cache = False
    return lm


def _check_vocabulary(lm: Any, tokens: int | None) -> None:
    has = lm.get_input_embeddings().weight.shape[0]
    if tokens is not None and has < tokens:
        accepted = f"a tokenizer of at most the model's {has} tokens"
        raise ConfigError(must_be("data.tokenizer", accepted, f"one of {tokens}", "Take the model's own."))
