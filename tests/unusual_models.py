"""Models as people bring them: lazy layers, sparse and complex gradients, buffers that passes change."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Lazy(nn.Module):
    """Lazy layers, one of which only training uses, and a buffer that training changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(12), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4))
        self.head = nn.LazyLinear(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1.0
            return torch.as_tensor(self.layers(inputs) + 0.1 * self.head(inputs))
        out: Tensor = self.layers(inputs)
        return out


class LazyLayers(nn.Sequential):
    """Lazy layers without a buffer."""

    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(12), nn.ReLU(), nn.LazyLinear(4))


class Unfinished(nn.Module):
    """A lazy layer that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.LazyLinear(4), nn.LazyLinear(4)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.used(inputs)
        return out


class SparseWords(nn.Module):
    """Sparse gradients of an embedding and of a bag beside dense ones; all are sparse with `dense=false`."""

    def __init__(self, vocab_size: int = 32, width: int = 6, dense: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, width, sparse=True)
        self.bag = nn.EmbeddingBag(vocab_size, width, mode="sum", sparse=True)
        self.head = nn.Linear(width, vocab_size) if dense else None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.bag(tokens).unsqueeze(1).tanh()
        if self.head is None:
            return torch.as_tensor(hidden @ self.words.weight.detach().t())
        out: Tensor = self.head(hidden)
        return out


class OwnSparse(nn.Module):
    """Sparse gradients of a parameter that is no embedding layer's."""

    def __init__(self, vocab_size: int = 32) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab_size, 6))
        self.head = nn.Linear(6, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(nn.functional.embedding(tokens, self.table, sparse=True))
        return out


class Spectral(nn.Module):
    """A layer of FNO: complex weights on the lowest frequencies (Li et al. 2021)."""

    def __init__(self, modes: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(modes, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(modes, modes, dtype=torch.complex64) * 0.3)
        self.register_buffer("phase", torch.polar(torch.ones(modes), torch.arange(modes) * 0.4))
        self.modes, self.head = modes, nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        low = torch.fft.rfft(inputs)[:, : self.modes]
        low = low * self.weight * self.phase + low @ self.mix
        out: Tensor = self.head(torch.fft.irfft(low, n=16))
        return out


class Lipschitz(nn.Module):
    """Spectral norms in torch's two forms."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 12))
        self.norm = nn.BatchNorm1d(12) if batch_norm else nn.Identity()
        self.last = nn.utils.spectral_norm(nn.Linear(12, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.norm(self.first(inputs)).tanh()))


class RunningMean(nn.Module):
    """Normalises by a mean over the samples that this process has seen; counts its passes beside."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("constant", torch.arange(16.0))
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(inputs.mean(0), 0.1)
        return torch.as_tensor(self.head(inputs - self.mean))


class Normalised(nn.Module):
    """A linear classifier behind a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.norm(inputs)))


class Shifted:
    """Samples around a mean."""

    def __init__(self, shift: float, num_samples: int = 48) -> None:
        inputs = shift + torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, (inputs[:, 0] > shift).long())
        self.train, self.evaluation = data, data
