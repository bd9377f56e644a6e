"""Low-rank adapters of peft in a frozen model, and their export to peft's files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hetexp.core.errors import CheckpointError, ConfigError, must_be
from hetexp.model.exported import Exported

NAME = "default"
"""peft's name for a model's only adapter, which its files leave out."""


def attach(lm: nn.Module, rank: int, alpha: float, dropout: float, targets: str | list[str]) -> None:
    """Add an adapter to each linear layer, in place; its second factor is zero, so that outputs stay.

    Raises:
        ConfigError: no layer has one of the names, or a layer cannot have an adapter.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    if isinstance(targets, list):
        names = [name for name, _ in lm.named_modules()]
        unknown = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in names)]
        if unknown:
            kinds = {
                n.rpartition(".")[2] for n, module in lm.named_modules() if isinstance(module, nn.Linear)
            }
            accepted = f"all-linear or names of linear layers ({', '.join(sorted(kinds))})"
            raise ConfigError(must_be("model.targets", accepted, targets))
    try:
        inject_adapter_in_model(config, lm, NAME)
    except ValueError as error:
        raise ConfigError(
            must_be("model.targets", "layers that can have an adapter", targets, str(error))
        ) from error


def keep_trained_only(model: nn.Module) -> None:
    """Restrict a model's state to its trained tensors: frozen ones are neither saved nor loaded."""
    model.register_state_dict_post_hook(_leave_out)
    model.register_load_state_dict_post_hook(_ignore_frozen)


def _leave_out(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    trained = {prefix + name for name in _trained(model)}
    for name in [name for name in state if name.startswith(prefix) and name not in trained]:
        del state[name]


def _ignore_frozen(model: nn.Module, incompatible: Any) -> None:
    trained = _trained(model)
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name in trained]


def _trained(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter.requires_grad}


def exported(section: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Exported:
    """Return adapters as `peft.PeftModel.from_pretrained` reads them.

    Args:
        section: the `model` section of the run.
        tensors: tensors by the names of `HFCausalLM`.
    """
    from peft import LoraConfig

    renamed, targets = {}, set()
    for name, tensor in tensors.items():
        match = re.fullmatch(rf"lm\.(.+)\.(lora_[AB])\.{NAME}\.weight", name, re.ASCII)
        if match is None:
            raise CheckpointError(f"`model` must have adapters only, but the checkpoint has '{name}'.")
        place, factor = match.groups()
        renamed[f"base_model.model.{place}.{factor}.weight"] = tensor
        targets.add(place.rpartition(".")[2])
    config = LoraConfig(
        r=section["rank"],
        lora_alpha=section["alpha"],
        lora_dropout=section["dropout"],
        target_modules=sorted(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=section["folder"],
        inference_mode=True,
    )
    described = {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()
    }
    return Exported("adapter_model.safetensors", renamed, {"adapter_config.json": described})
