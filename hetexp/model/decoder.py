"""Calls the layers of a Hugging Face decoder one by one, with the arguments of its own forward pass.

The arguments of a layer beside the stream (rotary embeddings, causal masks, windows) depend only on the
length of the samples. So they are recorded from the decoder's own forward pass, in which a recorder replaces
each layer. That takes hardly any time, needs no weights, and fits every architecture of the usual parts.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

EMBEDDING, LAYERS, NORM, ROTARY, HEAD = "embed_tokens", "layers", "norm", "rotary_emb", "lm_head"
"""Names of the parts in most architectures."""


def why_not_cut(lm: nn.Module) -> str | None:
    """Return why a language model cannot be cut between its layers, `None` if it can."""
    kind, name = type(lm).__name__, base_name(lm)
    base = getattr(lm, name, None)
    if not isinstance(base, nn.Module):
        return f"{kind} has no part '{name}'"
    parts = dict(base.named_children())
    if lacking := [part for part in (EMBEDDING, LAYERS, NORM) if part not in parts]:
        return f"{kind}.{name} has no {lacking[0]}"
    if other := sorted(parts.keys() - {EMBEDDING, LAYERS, NORM, ROTARY}):
        return f"{kind}.{name} has {other[0]}, beside its embedding, layers and norm"
    if other := sorted(dict(lm.named_children()).keys() - {name, HEAD}):
        return f"{kind} has {other[0]}, beside its decoder and head"
    layers = parts[LAYERS]
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return f"{kind}.{name} has no list of layers"
    return None


def base_name(lm: nn.Module) -> str:
    """Return the name of a language model's decoder."""
    return str(getattr(lm, "base_model_prefix", "model"))


class Decoder:
    """A language model's forward pass around its layers, and the arguments of its layers.

    Args:
        lm: language model that `why_not_cut` accepts; layers, embedding, norm and head may be removed later,
        if
            nothing needs their results.
    """

    def __init__(self, lm: nn.Module) -> None:
        self._lm = lm
        layers: nn.ModuleList = getattr(lm, base_name(lm)).layers
        self._stand_ins = [_StandIn(layer) for layer in layers]
        self._recorded: tuple[Any, list[dict[str, Any]]] | None = None
        """Key of a stream, and the arguments of each layer for it."""
        for index, layer in enumerate(layers):
            kind: Any = type(layer)
            layer.__class__ = _callable_alone(kind)
            vars(layer).update(decoder=self, place=index)

    def begin(self, tokens: Tensor) -> Tensor:
        """Return the first layer's input, the stream [batch, seq, hidden], for tokens [batch, seq]."""
        self._run(input_ids=tokens)
        stream: Tensor = self._stand_ins[0].received
        self._forget()
        return stream

    def finish(self, stream: Tensor) -> Tensor:
        """Return logits [batch, seq, vocab] of the last layer's output."""
        logits: Tensor = self._run(stream, inputs_embeds=stream).logits
        self._forget()
        return logits

    def arguments(self, place: int, stream: Tensor) -> dict[str, Any]:
        """Return the arguments of the layer at this place beside the stream."""
        key = stream.shape, stream.dtype, stream.device
        if self._recorded is None or self._recorded[0] != key:
            # The arguments serve training, too, even if an evaluation records them.
            with torch.inference_mode(False), torch.no_grad():
                like = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
                self._run(like, inputs_embeds=like)
            self._recorded = key, [stand_in.arguments for stand_in in self._stand_ins]
            self._forget()
        return self._recorded[1][place]

    def _run(self, given: Tensor | None = None, **inputs: Any) -> Any:
        """Run the model's own forward pass without its layers.

        Args:
            given: output of every layer; `None`: its input.
        """
        for stand_in in self._stand_ins:
            stand_in.given = given
        name = base_name(self._lm)
        base = _shallow(getattr(self._lm, name), {LAYERS: nn.ModuleList(self._stand_ins)})
        with answers(next(iter(inputs.values()))):
            return _shallow(self._lm, {name: base}).forward(**inputs, use_cache=False)

    def _forget(self) -> None:
        for stand_in in self._stand_ins:
            stand_in.received, stand_in.given, stand_in.arguments = None, None, {}


def answers(inputs: Tensor) -> AbstractContextManager[Any]:
    """Let a model run on inputs without data, as an estimate of memory does.

    transformers checks whether a sample consists of several packed ones, which needs data.
    """
    return _Yes() if inputs.is_meta else nullcontext()


class _Yes(TorchFunctionMode):
    """Makes the truth value of a tensor without data true."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


class _StandIn(nn.Module):
    """Records the arguments of a layer; it has the layer's attributes, which models may read."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        attributes = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        for name, value in attributes.items():
            if not isinstance(value, (nn.Module, Tensor)) and name != "training":
                setattr(self, name, value)
        self.received: Any = None
        self.given: Tensor | None = None
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        self.received, self.arguments = hidden, arguments
        return hidden if self.given is None else self.given


@functools.cache
def _callable_alone(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of layers that look up their arguments beside the stream if called without them."""

    def forward(self: Any, hidden: Tensor, *others: Any, **arguments: Any) -> Any:
        if others or arguments:  # the whole model's own forward pass
            return kind.forward(self, hidden, *others, **arguments)
        hidden = hidden.to(_stream_type(self))  # between devices it may travel in another type
        out = kind.forward(self, hidden, **self.decoder.arguments(self.place, hidden))
        return out[0] if isinstance(out, tuple) else out

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _stream_type(layer: nn.Module) -> torch.dtype:
    types = (p.dtype for p in layer.parameters() if p.is_floating_point() and not p.requires_grad)
    return next(types, torch.get_default_dtype())


def _shallow(module: nn.Module, replaced: dict[str, nn.Module]) -> Any:
    """Return a shallow copy of a module with some parts replaced and without hooks."""
    copy = object.__new__(type(module))
    copy.__dict__ = dict(module.__dict__)
    copy.__dict__["_modules"] = {**module._modules, **replaced}
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        copy.__dict__[name] = OrderedDict()
    return copy
