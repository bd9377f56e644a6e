"""Muon for the weight matrices of hidden layers, and AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import nn

from hetexp.core.errors import ConfigError, must_be

_FLAG = "muon"
"""Key of a group that says which of the two updates it."""
_SINCE = "2.9"


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, `torch.optim.Muon`) beside AdamW, as one optimizer.

    Muon orthogonalises the update of a whole matrix. It takes parameters of two dimensions that are neither
    embeddings nor the model's last layer.

    Args:
        params: parameters, or groups of them with the key `muon`.
        lr: Muon's learning rate before the schedule.
        weight_decay: part of each weight that a step removes, × the learning rate.
        momentum: part of the running mean of gradients that a step keeps.
        nesterov: whether the momentum is Nesterov's.
        ns_steps: steps of the Newton–Schulz iteration.
        adjust_lr_fn: how the rate follows a matrix's shape: `original`, or `match_rms_adamw`, which makes
            AdamW's rates fit; `None`: `original`.
        adamw_lr: AdamW's learning rate before the schedule.
        adamw_betas: parts of AdamW's running mean and square that a step keeps.
        adamw_eps: added to the root of AdamW's running square.
        adamw_weight_decay: part of each of AdamW's weights that a step removes, × the learning rate.
        adamw_match: patterns of matrices that AdamW updates; `None`: embeddings and the last layer.

    Raises:
        ConfigError: this torch has no Muon.
    """

    def __init__(
        self,
        params: Any,
        lr: NonNegativeFloat = 0.02,
        weight_decay: NonNegativeFloat = 0.1,
        momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95,
        nesterov: bool = True,
        ns_steps: PositiveInt = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        adamw_lr: NonNegativeFloat = 0.002,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: NonNegativeFloat = 1e-8,
        adamw_weight_decay: NonNegativeFloat = 0.01,
        adamw_match: list[str] | None = None,
    ) -> None:
        if problems := self.check():
            raise ConfigError(problems)
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        adamw = {
            "lr": adamw_lr,
            "betas": tuple(adamw_betas),
            "eps": adamw_eps,
            "weight_decay": adamw_weight_decay,
        }
        groups = _as_groups(params)
        super().__init__([{**(muon if group[_FLAG] else adamw), **group} for group in groups], {})
        self._link()

    @staticmethod
    def check(**arguments: Any) -> list[str]:
        """Return the problem of a torch without Muon."""
        if hasattr(torch.optim, "Muon"):
            return []
        fix = f"torch.optim.Muon is in torch {_SINCE} and newer, and this is torch {torch.__version__}."
        return [must_be("optimizer", "another one than muon with this torch", "muon", fix)]

    @staticmethod
    def kinds(model: nn.Module, section: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return which of a whole model's trained parameters Muon updates, by name.

        Raises:
            ConfigError: there is none.
        """
        patterns = section.get("adamw_match")
        others = _embeddings_and_last_layer(model) if patterns is None else set()
        kinds = {
            name: {
                _FLAG: parameter.dim() == 2
                and id(parameter) not in others
                and not any(fnmatchcase(name, pattern) for pattern in patterns or ())
            }
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        kinds = dict(sorted(kinds.items(), key=lambda item: not item[1][_FLAG]))  # `optimizer.lr` is logged
        if not any(kind[_FLAG] for kind in kinds.values()):
            raise ConfigError(
                "`optimizer` muon needs a matrix of a hidden layer, but the model has none: its trained "
                "parameters are embeddings, the last layer, or not of two dimensions. optimizer=adamw trains "
                "them all."
            )
        return kinds

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Let both update their parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()

    def defaults_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of the optimizer that updates a group."""
        part = next(part for part in self._parts if any(own is group for own in part.param_groups))
        return {**part.defaults, _FLAG: group[_FLAG]}

    def _link(self) -> None:
        """Make both optimizers, which work on this one's groups and state."""
        self._parts: list[torch.optim.Optimizer] = []
        for is_muon, make in ((True, torch.optim.Muon), (False, torch.optim.AdamW)):
            groups = [group for group in self.param_groups if group[_FLAG] is is_muon]
            if groups:
                self._parts.append(make(groups))  # it adds what these very groups lack
                self._parts[-1].state = self.state


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """Return groups, of plain parameters by their dimensions alone."""
    given = list(params)
    if not given or isinstance(given[0], dict):
        return given
    matrices = [parameter for parameter in given if parameter.dim() == 2]
    others = [parameter for parameter in given if parameter.dim() != 2]
    pairs: Sequence[tuple[list[Any], bool]] = ((matrices, True), (others, False))
    return [{"params": several, _FLAG: flag} for several, flag in pairs if several]


def _embeddings_and_last_layer(model: nn.Module) -> set[int]:
    """Return the ids of the matrices of embeddings and of the last module that has one."""
    matrices = [
        (module, parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2
    ]
    of_embeddings = {id(p) for module, p in matrices if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    last = matrices[-1][0] if matrices else None
    return of_embeddings | {id(p) for module, p in matrices if module is last}
