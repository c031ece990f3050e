"""Copies of weights for loops that read them over and over, such as decoding."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.ops.linear import Linear, by_onednn, onednn_linear, reader, shaped
from polyformer.ops.product_ways import ROW_STEP

PACKED_LIMIT = 2 << 30
"""Bytes of packed copies that one `PackedWeights` makes at most."""


class PackedWeights:
    """Copies of weights in oneDNN's own order of memory, which it reads up to twice as fast for few rows.

    `with packed:` every product outside autograd goes the way that the first one of its weight was found to
    go, without looking again: for a loop of small products of one dtype on one device, such as decoding. With
    `copying`, products of several rows read a copy of their weight, made when first asked for, and layers
    that read the same input (`linears`) a copy of all their weights. A copy costs its weight's memory and
    about twenty products' time. Whoever holds this object holds the copies; the weights must not change
    meanwhile.
    """

    def __init__(self, limit: int = PACKED_LIMIT):
        self.copies: dict[Tensor, Tensor] = {}
        self.room = limit
        self.copying = True
        self.joints: dict[int, _Joint | None] = {}  # by id of the first layer
        self.ways: dict[int, Tensor | None] = {}  # by id: what oneDNN reads, None for BLAS

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the function `linear`."""
        if not x.numel():  # tells nothing of the inputs to come: an expert that no token chose
            return F.linear(x, weight, bias)
        key = id(weight)
        if key in self.ways:
            read = self.ways[key]
        else:
            read = weight if by_onednn(x, weight) else None
            if isinstance(weight, nn.Parameter):  # others may be gone, and their ids somebody else's
                self.ways[key] = read
        if read is None:
            return F.linear(x, weight, bias)
        if read is weight and self.copying and x.numel() > x.shape[-1] and key in self.ways:
            read = self.ways[key] = self.copy(weight, x)
        return _few_rows(x, read, bias)

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        """As the function `linears`; once copies are made, of all weights in one."""
        if not x.numel():
            return [layer(x) for layer in layers]
        key = id(layers[0])
        if self.copying and key not in self.joints:
            self.joints[key] = self._joint(x, layers)
        joint = self.joints.get(key)
        if joint is None:
            return [layer(x) for layer in layers]
        return list(_few_rows(x, joint.weight, joint.bias).split(joint.sizes, -1))

    def _joint(self, x: Tensor, layers: Sequence[nn.Module]) -> "_Joint | None":
        """The layers as one; None where somebody watches them, or for products that are not oneDNN's."""
        plain = [
            layer
            for layer in layers
            if type(layer) is Linear and not layer._forward_hooks | layer._forward_pre_hooks
        ]
        size = sum(layer.weight.nbytes for layer in plain)
        if len(plain) < len(layers) or size > self.room or not by_onednn(x, plain[0].weight):
            return None
        self.room -= size
        weight = torch.cat([layer.weight for layer in plain])
        if x.numel() > x.shape[-1]:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, x.numel() // x.shape[-1])
        sizes = [layer.out_features for layer in plain]
        biases = [x.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in plain]
        bias = None if all(layer.bias is None for layer in plain) else torch.cat(biases)
        return _Joint(weight, bias, sizes)

    def copy(self, weight: Tensor, x: Tensor) -> Tensor:
        """The copy of `weight` for inputs like `x`, or the weight itself when there is no more room."""
        if weight not in self.copies:
            if weight.nbytes > self.room:
                return weight
            self.room -= weight.nbytes
            rows = x.numel() // x.shape[-1]
            self.copies[weight] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        return self.copies[weight]

    def __enter__(self) -> None:
        self.token = reader.set(self)

    def __exit__(self, *error: object) -> None:
        reader.reset(self.token)


@dataclasses.dataclass(frozen=True, eq=False)
class _Joint:
    """Layers one below the other, of so many rows each."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `onednn_linear`, with less ado where x has few rows."""
    rows = x.numel() // x.shape[-1]
    if rows > ROW_STEP:
        return onednn_linear(x, weight, bias)
    y = torch.ops.mkldnn._linear_pointwise(x.reshape(rows, x.shape[-1]), weight, bias, "none", [], "")
    return shaped(y, x)
