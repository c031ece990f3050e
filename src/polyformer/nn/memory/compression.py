"""Functions that compress every `rate` vectors of an old memory to a vector. Rae et al. 2020, section 3.1.

Each is a module: old [B, G, rate, E], the groups in order, to [B, G, E]. A layer uses only the weights with
its index.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import unknown

Usage = Callable[[Tensor], Tensor]
"""A function that returns the attention weight of every vector of a memory [B, M, E]: [B, M]."""


class Compression(nn.Module):
    """The base class of compressions, for `layers` layers, vectors of width E and groups of `rate`."""

    def __init__(self, layers: int, width: int, rate: int):
        super().__init__()
        self.rate = rate

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Compress [B, G, rate, E] to [B, G, E]."""
        raise NotImplementedError


class MeanCompression(Compression):
    """Mean pooling."""

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Return sum_r old_r / rate."""
        return old.mean(2)


class MaxCompression(Compression):
    """Max pooling."""

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Return max_r old_r, for each feature separately."""
        return old.amax(2)


class MostUsedCompression(Compression):
    """Selection of the vector in every group to which the last segment attended the most."""

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Return the old_r with the largest usage."""
        # [B, G, rate] -> [B, G], the index of the most used vector in its group.
        best = usage(old.flatten(1, 2)).unflatten(1, old.shape[1:3]).argmax(2)
        return old.take_along_dim(best[:, :, None, None], 2).squeeze(2)


class ConvolutionCompression(Compression):
    """A convolution with kernel and stride `rate`."""

    def __init__(self, layers: int, width: int, rate: int):
        super().__init__(layers, width, rate)
        self.maps = nn.ModuleList(nn.Linear(rate * width, width) for _ in range(layers))

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Return sum_r W_r old_r + b."""
        return self.maps[layer](old.flatten(2))


class DilatedCompression(Compression):
    """Convolutions of kernel 2 with dilations 1, 2, 4, ... until the last output sees the whole group, with a
    ReLU between them; the group is padded with zeros on the left."""

    def __init__(self, layers: int, width: int, rate: int):
        super().__init__(layers, width, rate)
        self.dilations = [2**k for k in range((rate - 1).bit_length())]
        self.maps = nn.ModuleList(
            nn.ModuleList(nn.Linear(2 * width, width) for _ in self.dilations) for _ in range(layers)
        )

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Apply x_t = W [x_(t - dilation), x_t] + b for each convolution in turn, and return the last x."""
        x = old
        for number, (dilation, part) in enumerate(zip(self.dilations, self.maps[layer])):  # type: ignore[call-overload]
            x = F.relu(x) if number else x
            # Kernel 2: every output reads x_t and x_(t - dilation), zeros before the group.
            x = part(torch.cat([F.pad(x, (0, 0, dilation, 0))[:, :, : self.rate], x], -1))
        return x[:, :, -1]


COMPRESSIONS: dict[str, type[Compression]] = {
    "mean": MeanCompression,
    "max": MaxCompression,
    "most_used": MostUsedCompression,
    "convolution": ConvolutionCompression,
    "dilated": DilatedCompression,
}
LEARNED = ["convolution", "dilated"]
"""The compressions that have weights."""


def compression(name: str) -> type[Compression]:
    """Return the compression called `name`; raises `InputError` with similar names if there is none."""
    if name not in COMPRESSIONS:
        raise unknown("compression", name, COMPRESSIONS)
    return COMPRESSIONS[name]
