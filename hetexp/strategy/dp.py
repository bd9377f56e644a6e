"""torch's DataParallel over several cards of one vendor, driven by one process, with unequal chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import NonNegativeInt

from hetexp.core.config import COLLATE, Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be
from hetexp.core.fault import LASTING
from hetexp.core.plan import Plan
from hetexp.core.precision import choose_precisions
from hetexp.hardware.backend import visible_places
from hetexp.plan.strategy import ExchangeText, Preparation
from hetexp.strategy.unexchanged import Unexchanged

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.comm.communicator import Communicator
    from hetexp.training.engine import Engine

log = logging.getLogger(__name__)

BACKENDS = ("cuda", "hip")
"""Backends on which torch can copy a model to several cards within a process."""


class DP(Unexchanged):
    """Copies the model to all cards for each pass, and gives each a chunk of the samples.

    The gradient is summed on the first card, which holds the weights. It needs no weighting: the loss is the
    sum over all chunks, divided by the global count (`hetexp/training/gradient.py`).

    Args:
        output_device: place, among the chosen cards, of the card that gathers outputs and computes the loss.
        dim: dimension of inputs and outputs that counts the samples.
    """

    name: ClassVar[str] = "dp"
    exact = True

    def __init__(self, output_device: NonNegativeInt = 0, dim: NonNegativeInt = 0) -> None:
        self.output_device = output_device
        self.dim = dim
        self._cards: tuple[DeviceSpec, ...] = ()
        self._shares: tuple[float, ...] = ()

    def engine(self) -> Engine:
        from hetexp.training.data_parallel import Alone

        return Alone()

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        names = ", ".join(str(device) for device in devices)
        if len(devices) < 2:
            return [must_be("strategy", f"ddp or single for one device ({names})", "dp")]
        reason = _why_not_in_one_process(devices)
        if reason is not None:
            return [must_be("strategy", f"ddp where {reason} ({names})", "dp")]
        problems = []
        precisions = choose_precisions(config.trainer.precision, devices)
        if len(set(precisions)) > 1:
            accepted = "auto_common, or one precision, where one process drives all cards"
            problems.append(must_be("trainer.precision", accepted, config.trainer.precision))
        if self.output_device >= len(devices):
            accepted = f"below the number of cards ({len(devices)})"
            problems.append(must_be("strategy.output_device", accepted, self.output_device))
        collate = config.data.get("collate")
        name = collate.get("_target_") if isinstance(collate, dict) else collate
        if name not in (None, "pad", COLLATE["pad"]):
            accepted = "ddp if `data.collate` makes batches whose tensors may have no row a sample"
            problems.append(must_be("strategy", accepted, "dp"))
        slowed = {event.device for event in config.fault.events if event.kind in LASTING}
        if slowed:
            accepted = f"ddp where `fault.events` slows a device ({', '.join(sorted(slowed))})"
            problems.append(must_be("strategy", accepted, "dp"))
        return problems

    def check_external_ranks(self, engine: str, world_size: int) -> list[str]:
        if world_size < 2:
            return []
        accepted = f"another than {self.name}, which drives all cards from one process, since {engine} "
        return [must_be("strategy", f"{accepted}starts one for each", self.name)]

    def fallback_hint(self) -> str:
        return ""

    def check_hosts(self) -> list[str]:
        return [must_be("strategy", "one with a process a device over several machines", self.name)]

    def prepare(self, plan: Plan, preparation: Preparation) -> Plan:
        return preparation.samples(in_one_process(plan))

    def all_reduces(self) -> bool:
        return False

    def describe_exchange(self, plan: Plan) -> ExchangeText | None:
        return ExchangeText("weights out, gradients back", how="one process", direct=True)

    def configure(self, plan: Plan) -> None:
        self._cards, self._shares = plan.cards, plan.card_shares

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        import torch

        from hetexp.comm.empty_share import EmptyShareGuard
        from hetexp.strategy.chunks import Replicated

        devices = [torch.device(device.type, place) for place in visible_places(self._cards)]
        seed = torch.initial_seed()
        for number, card in enumerate(devices):
            # With one seed for all, dropout would drop the same values on each card.
            with torch.cuda.device(card):
                torch.cuda.manual_seed(seed + number)
        return EmptyShareGuard(
            Replicated(model, devices, self._shares, devices[self.output_device], self.dim)
        )

    def attach_group(
        self,
        module: nn.Module,
        communicator: Communicator,
        inputs: Any,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        from hetexp.torch_private import BatchNormBase

        names = [name for name, layer in module.named_modules() if isinstance(layer, BatchNormBase)]
        if names:
            log.warning(
                "%d BatchNorm layers: their statistics are each card's own, and those of %s are kept. With "
                "strategy=ddp they are of all samples.",
                len(names),
                self._cards[0],
            )


def in_one_process(plan: Plan) -> Plan:
    """Return the plan with one rank for all devices; their shares stay."""
    return replace(
        plan,
        devices=plan.devices[:1],
        cards=plan.devices,
        shares=(1.0,),
        card_shares=plan.shares,
        local_batch_sizes=(sum(plan.local_batch_sizes),),
        collective_backend="gloo",
        route=None,
        threads=(sum(plan.threads),),
        precisions=plan.precisions[:1],
        reasons=(*plan.reasons, "One process drives all of these cards."),
    )


def _why_not_in_one_process(devices: Sequence[DeviceSpec]) -> str | None:
    """Return why one process cannot drive all of these devices, `None` if it can."""
    if any(device.emulated for device in devices):
        return "devices are emulated, slowed or limited in memory"
    if any(device.backend not in BACKENDS for device in devices):
        return "devices are not all cards of NVIDIA's or of AMD's"
    if len({device.backend for device in devices}) > 1:
        return "devices are of different vendors"
    if len({device.python for device in devices}) > 1:
        return "devices have interpreters of their own"
    if any((device.uuid or "").startswith("MIG-") for device in devices):
        return "devices are instances of a card, of which a process sees only one"
    return None
