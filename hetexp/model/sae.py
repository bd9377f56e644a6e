"""A sparse autoencoder of a model's activations: many features, few of which are active at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from hetexp.core.errors import ConfigError, must_be
from hetexp.model.base import WithAuxiliary, unknown
from hetexp.model.exported import Exported
from hetexp.model.hooks import ModelHooks, Probe, Shared, reset_moments
from hetexp.model.jump import jump, step
from hetexp.model.sae_lens import to_sae_lens

REVIVED_SCALE = 0.2
"""Length of a revived feature's encoder, of the mean length of those that fire (Bricken et al. 2023)."""


class SAE(ModelHooks, nn.Module):
    """Writes vectors as sums of few of many directions: x ≈ `b_dec` + Σ f_i · `W_dec`[i], ‖`W_dec`[i]‖ = 1.

    f = activation((x - `b_dec`) `W_enc` + `b_enc`), the activation being one of

    - `relu`, with the loss `l1_coefficient` · Σ|f| (Bricken et al. 2023, "Towards Monosemanticity");
    - `topk`, which keeps the `k` largest of each sample, and needs no such loss (Gao et al. 2024,
      arXiv:2406.04093);
    - `jumprelu`, which is zero up to a threshold a feature that is trained, with the loss
      `l0_coefficient` · ‖f‖₀ (Rajamanoharan et al. 2024, arXiv:2407.14435).

    The rows of `W_dec` have length 1 after every step and every merge, and the part of their gradient that
    only changes the length is taken out (Bricken et al. 2023). Features that have not fired for `dead_after`
    samples are dead; every `resample_every` steps they start again at samples that are drawn by their squared
    error, as there. Firings are counted over the samples of all ranks.

    Args:
        num_features: number of features (directions); `None`: `expansion` times the length of a vector.
        expansion: features for each number of a vector, if `num_features` is `None`.
        activation: activation: `relu` (with an L1 loss), `topk` or `jumprelu` (with an L0 loss).
        k: features of a sample under `topk`.
        l1_coefficient: weight of the sum of a sample's features in the loss, under `relu`.
        l0_coefficient: weight of the number of a sample's features in the loss, under `jumprelu`.
        threshold: initial threshold of every feature under `jumprelu`.
        bandwidth: width of the kernel that estimates the thresholds' gradient, under `jumprelu`.
        tied_init: whether the encoder starts as the decoder's transpose; otherwise it is drawn by itself.
        dead_after: samples without activity after which a feature is dead.
        resample_every: steps between restarts of dead features; 0: never.
        resample_until: last step with restarts; `None`: no limit.
        resample_candidates: training samples that are scored to draw restarts from.
        input_size: length of a vector; `None`: the data's.
        mean: initial bias of the decoder; `None`: the mean of the data, or 0 if the data has none.
        scale: factor that the data has applied to the vectors, for the export; `None`: the data's.

    Raises:
        ConfigError: `k` is above the number of features, or `input_size` is not known.
    """

    measures = ("l0", "explained_variance", "reconstruction", "dead_fraction")
    since_fired: Tensor
    firings: Tensor
    seen: Tensor
    scale: Tensor

    def __init__(
        self,
        num_features: PositiveInt | None = None,
        expansion: PositiveInt = 8,
        activation: Literal["relu", "topk", "jumprelu"] = "relu",
        k: PositiveInt = 32,
        l1_coefficient: NonNegativeFloat = 1.0,
        l0_coefficient: NonNegativeFloat = 0.1,
        threshold: PositiveFloat = 0.01,
        bandwidth: PositiveFloat = 0.05,
        tied_init: bool = True,
        dead_after: PositiveInt = 100_000,
        resample_every: NonNegativeInt = 0,
        resample_until: PositiveInt | None = None,
        resample_candidates: PositiveInt = 8192,
        input_size: PositiveInt | None = None,
        mean: Sequence[float] | None = None,
        scale: Annotated[float, Field(gt=0)] | None = None,
    ) -> None:
        super().__init__()
        if input_size is None:
            raise ConfigError(unknown(input_size=None))
        features = num_features if num_features is not None else expansion * input_size
        if problems := self.check(features, activation=activation, k=k):
            raise ConfigError(problems)
        self.activation, self.k, self.bandwidth = activation, k, bandwidth
        self.l1_coefficient, self.l0_coefficient = l1_coefficient, l0_coefficient
        self.dead_after = dead_after
        self.resample_every, self.resample_until = resample_every, resample_until
        self.resample_candidates = resample_candidates
        self.tally_size = features
        directions = _unit(torch.randn(features, input_size))
        encoder = directions if tied_init else torch.randn(features, input_size) / math.sqrt(input_size)
        # Names and shapes are those of SAELens.
        self.W_enc = nn.Parameter(encoder.T.clone(memory_format=torch.contiguous_format))
        self.b_enc = nn.Parameter(torch.zeros(features))
        self.W_dec = nn.Parameter(directions)
        self.b_dec = nn.Parameter(torch.zeros(input_size) if mean is None else torch.tensor(mean))
        if activation == "jumprelu":
            self.threshold = nn.Parameter(torch.full((features,), threshold))
        self._initial_threshold = threshold
        self.register_buffer("since_fired", torch.zeros(features, dtype=torch.int64))
        self.register_buffer("firings", torch.zeros(features, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.tensor(1.0 if scale is None else scale))

    @staticmethod
    def exported(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Exported:
        """Return a checkpoint's tensors as SAELens reads them."""
        return to_sae_lens(tensors, state)

    @staticmethod
    def check(num_features: int | None = None, activation: str = "relu", k: int = 32, **_: Any) -> list[str]:
        """Return which arguments do not fit together, one sentence a problem."""
        if activation == "topk" and num_features is not None and k > num_features:
            return [must_be("model.k", f"at most `model.num_features` ({num_features})", k)]
        return []

    def forward(self, inputs: Tensor) -> WithAuxiliary:
        """Return the reconstruction [batch, input_size] of vectors of that shape.

        With it come the sparsity loss of each sample [batch], and which features fired [batch, features].
        """
        before, features = self._encode(inputs)
        return WithAuxiliary(self.decode(features), self._sparsity(before, features), features > 0)

    def encode(self, inputs: Tensor) -> Tensor:
        """Return the features [batch, features] of vectors [batch, input_size], all at least 0."""
        return self._encode(inputs)[1]

    def decode(self, features: Tensor) -> Tensor:
        """Return the vectors [batch, input_size] of features [batch, features]."""
        return features @ self.W_dec + self.b_dec

    def _encode(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        before = (inputs - self.b_dec) @ self.W_enc + self.b_enc
        if self.activation == "topk":
            largest = before.topk(self.k, dim=-1)
            return before, torch.zeros_like(before).scatter(-1, largest.indices, largest.values.relu())
        if self.activation == "jumprelu":
            return before, jump(before, self.threshold, self.bandwidth)
        return before, before.relu()

    def _sparsity(self, before: Tensor, features: Tensor) -> Tensor:
        if self.activation == "jumprelu":
            return self.l0_coefficient * step(before, self.threshold, self.bandwidth).sum(dim=-1)
        if self.activation == "relu":
            return self.l1_coefficient * features.sum(dim=-1)
        return features.new_zeros(len(features))

    # ------------------------------------------------------------ between steps

    def project_gradients(self) -> None:
        """Remove the part of each decoder row's gradient that is parallel to the row."""
        gradient = self.W_dec.grad
        if gradient is not None:
            rows = _unit(self.W_dec)
            gradient -= (gradient * rows).sum(dim=1, keepdim=True) * rows

    def after_update(self) -> None:
        """Scale decoder rows to length 1, and raise thresholds to at least 0."""
        self.W_dec.copy_(_unit(self.W_dec))
        if self.activation == "jumprelu":
            self.threshold.clamp_(min=0.0)

    def probe_size(self, shared: Shared) -> int:
        """Request candidates if this step resamples and a feature is dead."""
        due = self._resamples(shared) and bool((self._counted(shared) >= self.dead_after).any())
        return self.resample_candidates if due else 0

    def scores(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of each sample, by which candidates are drawn."""
        return (self.decode(self.encode(inputs)) - targets).double().square().sum(dim=-1)

    def after_step(self, shared: Shared, optimizer: torch.optim.Optimizer) -> None:
        """Count firings, and restart dead features if this step resamples."""
        self.since_fired.copy_(self._counted(shared))
        self.firings += shared.tally
        self.seen += shared.samples
        if shared.probe is not None:
            dead = (self.since_fired >= self.dead_after).cpu()
            self._revive(shared.probe, dead.nonzero().flatten(), optimizer)
        if self._resamples(shared):
            self.firings.zero_()
            self.seen.zero_()

    def _counted(self, shared: Shared) -> Tensor:
        """Return the samples since each feature last fired, this step's included.

        If ranks count together only now and then, the samples in between have no order.
        """
        return (self.since_fired + shared.samples).masked_fill(shared.tally > 0, 0)

    def _resamples(self, shared: Shared) -> bool:
        every, until = self.resample_every, self.resample_until
        if not every or (until is not None and shared.step > until):
            return False
        return shared.step // every > shared.before // every

    def _revive(self, probe: Probe, dead: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Restart the features at these places at samples that the model reconstructs badly.

        The host computes in float64, so that the result does not depend on the kind of device.
        """
        chances = torch.nan_to_num(probe.scores, 0.0, 0.0, 0.0).numpy()
        number = min(len(dead), int(np.count_nonzero(chances)))
        if not number:
            return
        drawn = probe.random.choice(len(chances), number, replace=False, p=chances / chances.sum())
        dead = dead[:number]
        directions = _unit(probe.take(drawn.tolist()) - self.b_dec.detach().double().cpu())
        lengths = self.W_enc.detach().double().cpu().norm(dim=0)
        alive = torch.ones(len(lengths), dtype=torch.bool).index_fill(0, dead, False)
        length = REVIVED_SCALE * (lengths[alive].mean() if alive.any() else torch.tensor(1.0))
        places = dead.to(self.W_dec.device)
        self.W_dec[places] = directions.to(self.W_dec)
        self.W_enc[:, places] = (length * directions).T.to(self.W_enc)
        self.b_enc[places] = 0.0
        self.since_fired[places] = 0
        moved: list[tuple[nn.Parameter, int]] = [(self.W_dec, 0), (self.W_enc, 1), (self.b_enc, 0)]
        if self.activation == "jumprelu":
            self.threshold[places] = self._initial_threshold
            moved.append((self.threshold, 0))
        for parameter, dim in moved:
            reset_moments(optimizer, parameter, places, dim)

    # ------------------------------------------------------------ evaluation

    def measure(self, inputs: Tensor, targets: Tensor, output: object) -> Tensor:
        """Return samples, firings, squared error, squared length, and the sum of the vectors themselves."""
        assert isinstance(output, WithAuxiliary)
        assert output.tally is not None
        vectors = targets.double().cpu()
        error = (output.output.double().cpu() - vectors).square().sum()
        sums = [vectors.new_tensor(len(vectors)), output.tally.sum().double().cpu(), error]
        return torch.cat([torch.stack([*sums, vectors.square().sum()]), vectors.sum(dim=0)])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return active features a sample, explained variance, squared error a sample, part of dead features.

        The explained variance is 1 - Σ‖x - x̂‖² / Σ‖x - mean‖², the sums and the mean going over all samples.
        """
        count, firings, error, squares = sums[:4].tolist()
        if not count:
            return {}
        variance = squares - float(sums[4:].square().sum()) / count
        return {
            "l0": firings / count,
            "explained_variance": 1.0 - error / variance if variance > 0 else float("nan"),
            "reconstruction": error / count,
            "dead_fraction": float((self.since_fired >= self.dead_after).double().mean()),
        }


def _unit(rows: Tensor) -> Tensor:
    """Return the rows scaled to length 1; rows of zeros stay zeros."""
    lengths: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / lengths.where(lengths > 0, torch.ones_like(lengths))
