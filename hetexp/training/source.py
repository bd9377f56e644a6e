"""A trained model that yields activations for an autoencoder and evaluates their reconstructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from hetexp.checkpoint.folder import STATE, load_checkpoint
from hetexp.core.call import call_model
from hetexp.core.config import LossConfig
from hetexp.core.errors import CheckpointError, ConfigError, did_you_mean, must_be
from hetexp.core.files import read_json
from hetexp.core.instantiate import only_trusted, untrusted
from hetexp.data.base import build_data, stream_of
from hetexp.data.page_locked import on_device
from hetexp.model.base import WithAuxiliary, build_model
from hetexp.training.loss import Loss, build_loss, count_of
from hetexp.training.seeding import seeded

Replace = Callable[[Tensor], Tensor]


class SourceModel:
    """A checkpoint's model in evaluation, with its data and its loss.

    Args:
        checkpoint: its folder.
        layer: dotted name of a module; its output is a tensor [batch, …, width] or a tuple that begins with
            one.
        num_samples: of its evaluation data, at most; `None`: all.
        scale: factor of the autoencoder's vectors.

    Raises:
        CheckpointError: the checkpoint is damaged or missing.
        ConfigError: the model has no such layer, or `only_trusted` refuses a class of the checkpoint.
    """

    def __init__(
        self, checkpoint: Path, layer: str, num_samples: int | None = None, scale: float = 1.0
    ) -> None:
        try:
            state = read_json(checkpoint / STATE)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"The source model's checkpoint cannot be read: {error}.") from error
        config = state["extra"]["config"]
        if problems := untrusted({name: config[name] for name in ("model", "data")}):
            raise ConfigError(problems)
        loss = LossConfig(**config.get("loss", {}))
        with seeded(config["trainer"].get("seed", 0)):  # its own split, as in its training
            self.data = build_data(config["data"], loss.ignored())
        if stream_of(self.data.train) is not None or stream_of(self.data.evaluation) is not None:
            raise ConfigError("The source model must have data sets with a length, but has a stream.")
        self.model = build_model(config["model"], self.data.facts).eval().requires_grad_(False)
        if config["trainer"].get("precision") == "float64":
            self.model.double()
        load_checkpoint(checkpoint, self.model, None)
        modules = dict(self.model.named_modules())
        if layer not in modules or not layer:
            fix = did_you_mean(layer, [name for name in modules if name]).strip()
            raise ConfigError(must_be("--layer", "the name of a module of the model", layer, fix))
        self._layer = modules[layer]
        name = config["trainer"].get("loss", "cross_entropy")
        self.loss: Loss = build_loss(name, loss.arguments())
        self.scale = scale
        self.target: str = config["model"]["_target_"]
        evaluation = self.data.evaluation
        available = len(evaluation) if evaluation is not None else 0  # type: ignore[arg-type]
        self.num_samples = available if num_samples is None else min(available, num_samples)

    @classmethod
    def judging(cls, path: Path, num_samples: int, scale: float, trusted: Sequence[str] = ()) -> SourceModel:
        """Return the model that a `source.json` names.

        Args:
            path: of the file. It and the checkpoint may come from a stranger, even if the training does not.
            num_samples: of its evaluation data, at most.
            scale: factor of the autoencoder's vectors.
            trusted: packages whose classes may be built, beside hetexp's own.

        Raises:
            ConfigError: the file does not name a model, or a class of the checkpoint is not trusted.
        """
        try:
            recorded = read_json(path)
            checkpoint, layer = Path(recorded["checkpoint"]), str(recorded["layer"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            accepted = "0 if source.json does not name a checkpoint and a layer"
            raise ConfigError(must_be("data.loss_recovered", accepted, num_samples, f"{error}.")) from error
        with only_trusted(trusted, how="{} to data.trust"):
            return cls(checkpoint, layer, num_samples, scale)

    def vectors(self, dataset: Dataset[Any], batch_size: int) -> Iterator[Tensor]:
        """Yield the layer's outputs over a data set in its order, as vectors [any number, width]."""
        outputs: list[Tensor] = []

        def keep(vectors: Tensor) -> Tensor:
            outputs.append(vectors.flatten(0, -2))
            return vectors

        for inputs, _ in DataLoader(dataset, batch_size, collate_fn=self.data.collate):
            with torch.inference_mode(), self._replaced(keep):
                self._call(inputs)
            yield torch.cat(outputs)
            outputs.clear()

    def sums(
        self,
        autoencoder: nn.Module,
        first: int,
        end: int,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        alive: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Return sums over some evaluation samples, [4] float64, to be added up over ranks.

        They are the count of elements, and three losses: of the unchanged model, with the reconstruction as
        the layer's output, and with zeros as its output.

        Args:
            first: number of the first sample.
            end: number after the last one.
            alive: called after each batch.
        """
        self.model.to(device, dtype)
        sums = torch.zeros(4, dtype=torch.float64)
        if first == end or self.data.evaluation is None:
            return sums

        def reconstructed(vectors: Tensor) -> Tensor:
            rows = autoencoder(vectors.flatten(0, -2) * self.scale)
            rows = rows.output if isinstance(rows, WithAuxiliary) else rows
            back: Tensor = (rows / self.scale).view(vectors.shape)
            return back

        replacements: Sequence[Replace] = (lambda vectors: vectors, reconstructed, torch.zeros_like)
        samples = Subset(self.data.evaluation, range(first, end))
        batches = DataLoader(samples, batch_size, collate_fn=self.data.collate)
        for number, (inputs, targets) in enumerate(batches):
            loss = self.loss.for_samples(min(batch_size, end - first - number * batch_size))
            moved = on_device(inputs, device, dtype), on_device(targets, device, dtype)
            sums[0] += count_of(loss, targets)
            for place, replacement in enumerate(replacements, 1):
                with torch.inference_mode(), self._replaced(replacement):
                    sums[place] += float(loss.total(self._call(moved[0]), moved[1]))
            alive()
        return sums

    @staticmethod
    def metrics(sums: Tensor) -> dict[str, float]:
        """Return the three mean losses, and the fraction of the zeros' extra loss that is recovered."""
        count, clean, spliced, zero = sums.tolist()
        if not count:
            return {}
        costs = zero - clean
        return {
            "source_loss": clean / count,
            "spliced_loss": spliced / count,
            "zero_loss": zero / count,
            "loss_recovered": (zero - spliced) / costs if costs else float("nan"),
        }

    def _call(self, inputs: Any) -> Any:
        output = call_model(self.model, inputs)
        return output.output if isinstance(output, WithAuxiliary) else output

    @contextmanager
    def _replaced(self, replace: Replace) -> Iterator[None]:
        """Replace the layer's output by the result of `replace` in the block."""

        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (replace(output[0]), *output[1:])
            return replace(output)

        handle = self._layer.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()
