"""Muon for the weight matrices of hidden layers, and AdamW for all other parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import nn

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, must_be

log = logging.getLogger(__name__)
_LR_SCALES: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factor of the learning rate by a matrix's rows and columns, for each `adjust_lr_fn`."""
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
        ns_dtype: type that the iteration computes in; `None`: float64 for weights in float64; else float32 if
            the ranks' devices are of different kinds, and bfloat16 if not.
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

    usual_dtype = torch.bfloat16
    """Type that the iteration computes in if neither the weights nor `ns_dtype` decide."""

    def __init__(
        self,
        params: Any,
        lr: NonNegativeFloat = 0.02,
        weight_decay: NonNegativeFloat = 0.1,
        momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95,
        nesterov: bool = True,
        ns_steps: PositiveInt = 5,
        ns_dtype: Literal["bfloat16", "float32", "float64"] | None = None,
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
            "ns_dtype": ns_dtype,
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
            if not isinstance(part, torch.optim.Muon):
                part.step()
                continue
            for group in part.param_groups:
                _step_of_muon(group, self.state, self.usual_dtype)
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


def keep_replicas_equal(optimizer: torch.optim.Optimizer, devices: Sequence[DeviceSpec]) -> None:
    """Let replicas on devices of different kinds stay equal up to rounding of float32, or warn.

    Such devices round otherwise, which in Muon's bfloat16 moves their weights apart by 1e-3 of an update.

    Args:
        devices: of all ranks.
    """
    if len({(device.backend, device.name) for device in devices}) < 2:
        return
    if isinstance(optimizer, MuonWithAdamW):
        optimizer.usual_dtype = torch.float32
    elif isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        log.warning(
            "torch.optim.Muon computes in bfloat16, in which these devices round differently: their weights "
            "will drift apart. hetexp.optimizer.muon.MuonWithAdamW computes in float32 here."
        )


def _step_of_muon(group: Mapping[str, Any], state: Any, usual: torch.dtype) -> None:
    """Update a group's parameters as `torch.optim.Muon.step` does, which always computes in bfloat16.

    Args:
        usual: type that the iteration computes in unless the weights are float64 or the group says another.
    """
    a, b, c = group["ns_coefficients"]
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        gradient, buffers = parameter.grad, state[parameter]
        if "momentum_buffer" not in buffers:
            buffers["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = buffers["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        dtype = torch.float64 if parameter.dtype == torch.float64 else usual
        if group.get("ns_dtype") is not None:
            dtype = getattr(torch, group["ns_dtype"])
        rows, columns = parameter.shape
        wide = update.to(dtype, copy=True)
        wide = wide.T if rows > columns else wide
        wide.div_(wide.norm().clamp(min=group["eps"]))
        for _ in range(group["ns_steps"]):
            gram = wide @ wide.T
            wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        scale = _LR_SCALES[group["adjust_lr_fn"] or "original"](rows, columns)
        parameter.add_(wide.T if rows > columns else wide, alpha=-group["lr"] * scale)


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
