"""Copies of weights for loops that read them over and over, such as decoding."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.ops.activations import ACTIVATIONS
from polyformer.ops.huge_pages import use_huge_pages
from polyformer.ops.linear import by_onednn, is_plain, onednn_linear, onednn_takes, reader
from polyformer.ops.product_ways import ROW_STEP

PACKED_LIMIT = 2 << 30
"""Bytes of packed copies that are made of one model at most."""

SMALL_WEIGHT = 1 << 16
"""Of so few numbers no copy is made: the product is over before oneDNN, some 10 microseconds a call, has
begun. Larger weights are read from memory in a loop, where a packed copy is read the fastest."""

RUN = 1021
"""Words whose bits are added up to tell whether a weight was written to. A prime, so that runs end elsewhere
in every row: rows, columns or heads that trade places change the sums too."""

FUSED: dict[str, tuple[str, str | None]] = {
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "sigmoid": ("sigmoid", ""),
    "tanh": ("tanh", ""),
}
"""Activations that oneDNN computes with a product: its names and variants."""


class Copies:
    """Copies of weights in oneDNN's own order of memory, which it reads up to twice as fast for few rows.

    A copy costs its weight's memory and about twenty products' time. Whoever holds this object holds the
    copies, and calls `drop_changed` before weights that may have changed are read again.
    """

    def __init__(self, limit: int = PACKED_LIMIT):
        self.limit = limit
        self.kept: dict[tuple[int, ...], _Copy] = {}  # by the ids of the weights

    def of(self, *weights: Tensor) -> Tensor | None:
        """Weights [O, I], one below the other, as one copy; None when there is no more room."""
        key = tuple(map(id, weights))
        copy = self.kept.get(key)
        if copy is None:
            size = sum(weight.nbytes for weight in weights)
            if size + sum(other.size for other in list(self.kept.values())) > self.limit:
                return None
            copy = self.kept[key] = _copied(weights, size)
        return copy.packed

    def drop_changed(self, parameters: Iterable[Tensor]) -> None:
        """Drop copies of weights that are none of `parameters` any more, or that were written to since.

        All bits are read again, half a token's time: not every way to write to a tensor (through `.data`,
        numpy, another process) leaves a trace in its version.
        """
        present = {id(parameter) for parameter in parameters}
        for key, copy in list(self.kept.items()):
            if not (present.issuperset(key) and copy.is_current()):
                self.kept.pop(key, None)


@dataclasses.dataclass(frozen=True, eq=False)
class _Copy:
    """packed: the weights, one below the other. sums: of their bits. size: in bytes."""

    weights: tuple[Tensor, ...]
    sums: list[Tensor]
    packed: Tensor
    size: int

    def is_current(self) -> bool:
        return all(torch.equal(old, _sums(weight)) for old, weight in zip(self.sums, self.weights))


def _copied(weights: tuple[Tensor, ...], size: int) -> _Copy:
    """Laid out for many rows, which is the fastest for a single one too."""
    sums = [_sums(weight) for weight in weights]  # before they are copied: a write in between is seen
    joint = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
    packed = torch.ops.mkldnn._reorder_linear_weight(joint, ROW_STEP)
    use_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return _Copy(weights, sums, packed, size)


def _sums(weight: Tensor) -> Tensor:
    """Sums of the bits of runs of a weight; nothing for one of no type that is packed, or not on a CPU any
    more."""
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        return torch.empty(0)
    weight = weight.detach()
    flat = (weight.mT if weight.mT.is_contiguous() else weight).reshape(-1)
    word = 8 // weight.itemsize
    if flat.numel() % word or flat.storage_offset() % word:
        flat = F.pad(flat, (0, -flat.numel() % word)).clone()
    words = flat.view(torch.int64)
    runs = words[: len(words) // RUN * RUN].view(-1, RUN).sum(1)
    return torch.cat([runs, words[len(runs) * RUN :].sum(0, keepdim=True)])


_kept: "WeakKeyDictionary[nn.Module, Copies]" = WeakKeyDictionary()


def kept_copies(model: nn.Module) -> Copies:
    """The copies that are kept as long as the model lives, those of weights that have changed dropped."""
    copies = _kept.setdefault(model, Copies())
    copies.drop_changed(model.parameters())
    return copies


class PackedWeights:
    """A loop of small products of one dtype on one device, such as decoding; its weights do not change.

    `with packed:` every product outside autograd goes the way that the first one of its weight was found to
    go, without looking again: through `copies` of the weights, made when first asked for, or without any
    through the weights themselves. Layers that read the same input (`linears`) are one product.
    """

    def __init__(self, copies: Copies | None):
        self.copies = copies
        self.joints: dict[int, _Joint | Literal[False]] = {}  # by id of the first layer; False: each alone
        self.ways: dict[int, Tensor | Literal[False]] = {}  # by id: what oneDNN reads, False for BLAS

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the function `linear`."""
        read = self.ways.get(id(weight))
        if read is None:
            read = self._way(x, weight)
        return F.linear(x, weight, bias) if read is False else _product(x, read, bias)

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
        """As the function `linears`; where copies are made, through one of all weights."""
        joint = self.joints.get(id(layers[0]))
        if joint is None:
            joint = self._joint(x, layers)
        if joint is False:
            return [layer(x) for layer in layers]
        return _product(x, joint.weight, joint.bias).split_with_sizes(joint.sizes, -1)

    def activated(self, x: Tensor, layer: nn.Module, activation: str) -> Tensor:
        """As the function `activated`; in one step where oneDNN computes the product."""
        if is_plain(layer):
            read = self.ways.get(id(layer.weight))
            if read is None:
                read = self._way(x, layer.weight)
            if read is not False:
                return _product(x, read, layer.bias, activation)
        return ACTIVATIONS[activation](layer(x))

    def _way(self, x: Tensor, weight: Tensor) -> Tensor | Literal[False]:
        """What `ways` has from now on, judged by one row: a prompt's many are not what follows. Weights that
        are no parameters may be gone, and their ids somebody else's; no input (of an expert that no token
        chose) tells nothing of those to come."""
        takes = by_onednn(_row(x), weight)
        if not isinstance(weight, nn.Parameter) or not x.numel():
            return weight if takes else False
        copy = self._copy(x, weight)
        read = self.ways[id(weight)] = (weight if takes else False) if copy is None else copy
        return read

    def _copy(self, x: Tensor, *weights: Tensor) -> Tensor | None:
        """The copy of weights that oneDNN may multiply with inputs like x; None where there is to be none."""
        large = sum(weight.numel() for weight in weights) > SMALL_WEIGHT
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 and packs_bfloat16() else torch.float32
        if self.copies is None or not large or not onednn_takes(_row(x), weights[0], dtype):
            return None
        return self.copies.of(*weights)

    def _joint(self, x: Tensor, layers: Sequence[nn.Module]) -> "_Joint | Literal[False]":
        """The layers as one; False where somebody watches them, or for products that are not oneDNN's."""
        if not x.numel():
            return False
        plain = [layer for layer in layers if is_plain(layer)]
        weight = None
        joint: _Joint | Literal[False] = False
        if len(plain) == len(layers):
            weight = self._copy(x, *(layer.weight for layer in plain))
        if weight is not None:
            biases = [
                x.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in plain
            ]
            bias = None if all(layer.bias is None for layer in plain) else torch.cat(biases)
            joint = _Joint(weight, bias, [layer.out_features for layer in plain])
        self.joints[id(layers[0])] = joint
        return joint

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


@functools.cache
def packs_bfloat16() -> bool:
    """Whether oneDNN has products of bfloat16 here."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _row(x: Tensor) -> Tensor:
    """The first row [1, I] of x [..., I], if it has any."""
    return x.reshape(-1, x.shape[-1])[:1]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """x times a weight, packed or not, by oneDNN; with less ado where x has few rows."""
    if x.numel() > ROW_STEP * x.shape[-1]:
        y = onednn_linear(x, weight, bias)
        return y if activation is None else ACTIVATIONS[activation](y)
    name, variant = ("none", "") if activation is None else FUSED[activation]
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, name, [], variant)
