"""Calls the layers of a Hugging Face decoder one by one, with what its own forward pass would give each.

What a decoder gives its layers beside the stream (rotary embeddings, causal masks, windows) follows from the
length of the samples alone. So it is recorded from the decoder's own forward pass, in which something that
records stands for each layer: that costs next to nothing, needs no weights, and fits every architecture of
the usual parts.
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
"""What most architectures call their parts."""


def why_not_cut(lm: nn.Module) -> str | None:
    """Return why a language model cannot be cut between its layers, `None` where it can."""
    kind, name = type(lm).__name__, base_name(lm)
    base = getattr(lm, name, None)
    if not isinstance(base, nn.Module):
        return f"{kind} has no part '{name}'"
    parts = dict(base.named_children())
    if lacking := [part for part in (EMBEDDING, LAYERS, NORM) if part not in parts]:
        return f"{kind}.{name} has no {lacking[0]}"
    known = {EMBEDDING, LAYERS, NORM, ROTARY}
    if other := sorted(parts.keys() - known):
        return f"{kind}.{name} has {other[0]}, beside its embedding, layers and norm"
    if other := sorted(dict(lm.named_children()).keys() - {name, HEAD}):
        return f"{kind} has {other[0]}, beside its decoder and head"
    layers = parts[LAYERS]
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return f"{kind}.{name} has no list of layers"
    return None


def base_name(lm: nn.Module) -> str:
    """Return under which name a language model has its decoder."""
    return str(getattr(lm, "base_model_prefix", "model"))


class Decoder:
    """A language model's own forward pass around its layers, and what its layers get in it.

    Args:
        lm: that `why_not_cut` has nothing against; layers, embedding, norm and head may be gone later, as
            long as what they compute is not needed.
    """

    def __init__(self, lm: nn.Module) -> None:
        self._lm = lm
        layers: nn.ModuleList = getattr(lm, base_name(lm)).layers
        self._stand_ins = [_StandIn(layer) for layer in layers]
        self._known: tuple[Any, list[dict[str, Any]]] | None = None
        """Of which stream the arguments below are, and those of each layer."""
        for index, layer in enumerate(layers):
            kind: Any = type(layer)
            layer.__class__ = _alone(kind)
            vars(layer).update(decoder=self, place=index)

    def begin(self, tokens: Tensor) -> Tensor:
        """Return what the first layer takes of tokens [batch, seq]: the stream [batch, seq, hidden]."""
        self._run(input_ids=tokens)
        stream: Tensor = self._stand_ins[0].came
        self._forget()
        return stream

    def finish(self, stream: Tensor) -> Tensor:
        """Return logits [batch, seq, vocab] of what the last layer gives."""
        logits: Tensor = self._run(stream, inputs_embeds=stream).logits
        self._forget()
        return logits

    def arguments(self, place: int, stream: Tensor) -> dict[str, Any]:
        """Return what the model gives the layer of this place beside the stream."""
        key = stream.shape, stream.dtype, stream.device
        if self._known is None or self._known[0] != key:
            # What is kept serves training, too, whoever asks first.
            with torch.inference_mode(False), torch.no_grad():
                like = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
                self._run(like, inputs_embeds=like)
            self._known = key, [stand_in.arguments for stand_in in self._stand_ins]
            self._forget()
        return self._known[1][place]

    def _run(self, given: Tensor | None = None, **inputs: Any) -> Any:
        """Run the model's own forward pass without its layers.

        Args:
            given: what the layers give; `None`: what they get.
        """
        for stand_in in self._stand_ins:
            stand_in.given = given
        name = base_name(self._lm)
        base = _shallow(getattr(self._lm, name), {LAYERS: nn.ModuleList(self._stand_ins)})
        with answers(next(iter(inputs.values()))):
            return _shallow(self._lm, {name: base}).forward(**inputs, use_cache=False)

    def _forget(self) -> None:
        for stand_in in self._stand_ins:
            stand_in.came, stand_in.given, stand_in.arguments = None, None, {}


def answers(inputs: Tensor) -> AbstractContextManager[Any]:
    """Let a model run on inputs without data, as an estimate of memory does.

    transformers asks whether a sample is several that were packed into one. None is here; without data there
    would be no answer.
    """
    return _Yes() if inputs.is_meta else nullcontext()


class _Yes(TorchFunctionMode):
    """Answers yes to what is asked of a tensor without data."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


class _StandIn(nn.Module):
    """Records what a layer would get; models read some attributes of their layers, which it has as well."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        attributes = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        for name, value in attributes.items():
            if not isinstance(value, (nn.Module, Tensor)) and name != "training":
                setattr(self, name, value)
        self.came: Any = None
        self.given: Tensor | None = None
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        self.came, self.arguments = hidden, arguments
        return hidden if self.given is None else self.given


@functools.cache
def _alone(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of layers that know what they get beside the stream, if they are given nothing."""

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
    """Return a module that has the same tensors and parts but for some, and no hooks."""
    copy = object.__new__(type(module))
    copy.__dict__ = dict(module.__dict__)
    copy.__dict__["_modules"] = {**module._modules, **replaced}
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        copy.__dict__[name] = OrderedDict()
    return copy
