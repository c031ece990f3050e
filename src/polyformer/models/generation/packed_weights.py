"""Weights in the layouts of fast products, and packed copies for loops that read them repeatedly.

Products with few rows take as long as reading the weight from memory:

    row       W^T, for BLAS's product of a single row with a matrix
    onednn    blocks of oneDNN, for any number of rows
    mkl       blocks of MKL, for a stated number of rows; up to twice the memory (x86)

No library is the fastest on every processor, so the layouts for one row and for several rows are measured.

A graph that torch's compiler gets for a single row reads the weights as they are (`row_product`).
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.host_values import is_recorded
from polyformer.core.ops.compiled_code import row_product
from polyformer.core.ops.cpu import use_huge_pages
from polyformer.core.ops.layers import ACTIVATIONS
from polyformer.core.ops.linear import (
    LinearBackend,
    by_onednn,
    is_plain,
    onednn_linear,
    onednn_takes,
    stacked_bias,
)
from polyformer.core.ops.product_kernels import CLEARLY, ROW_STEP, onednn_product
from polyformer.core.ops.tuning import Section, cache_emptier, least_seconds
from polyformer.core.recorded_graph import GraphObject, graph_object

Layout = Literal["row", "onednn", "mkl"]

FUSED: dict[str | None, tuple[str, str | None]] = {
    None: ("none", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "sigmoid": ("sigmoid", ""),
    "tanh": ("tanh", ""),
}
"""Activations that oneDNN fuses with a product: its names and variants."""

SEVERAL, SHAPE, ROUNDS = 8, (3072, 768), 6
"""The rows, the weight and the number of tries of the measurement."""

FASTER: dict[Layout, float] = {"row": CLEARLY, "mkl": 1.15}
"""The factor by which a layout must be faster than oneDNN's; MKL's takes up to twice the memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutConfig(Config):
    """The fastest layout for one row, and for several."""

    single: Layout = "onednn"
    several: Layout = "onednn"

    def layout(self, rows: int, dtype: torch.dtype) -> Layout:
        """Return the layout for this number of rows; only oneDNN computes with bfloat16."""
        if dtype != torch.float32:
            return "onednn"
        return self.single if rows == 1 else self.several


@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight(GraphObject):
    """A copy of a weight [O, I] in a layout.

    rows: the most rows of a product, unless the layout is oneDNN's. sized: a tensor with the weight's shape
    but without its memory; MKL's product reads the shape.
    """

    layout: Layout
    rows: int
    packed: Tensor
    sized: Tensor

    @classmethod
    def of(cls, weight: Tensor, layout: Layout, rows: int) -> "PackedWeight":
        """Return a copy of a weight [O, I]."""
        weight = weight.detach()
        sized = weight.new_empty(1).expand(weight.shape)
        if layout == "row":
            packed = weight.T.contiguous()
            use_huge_pages(packed.data_ptr(), packed.nbytes)
            return cls(layout, 1, packed, sized)
        if layout == "mkl":
            packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), rows)
        else:
            # The layout for many rows is the fastest for a single row too.
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROW_STEP)
        use_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
        return cls(layout, rows, packed, sized)

    @functools.cached_property
    def nbytes(self) -> int:
        """The bytes of the copy."""
        return self.packed.nbytes if self.layout == "row" else torch.ops.mkldnn._nbytes(self.packed)

    def serves(self, rows: int) -> bool:
        """Return whether the copy can compute a product with this number of rows."""
        return self.layout == "onednn" or 0 < rows <= self.rows

    def product(self, x: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
        """Return the activation of x [..., I] times the weight, plus the bias: [..., O]."""
        if self.layout != "row" and is_recorded():
            return torch.ops.polyformer.packed_product.default(x, self.key, self.sized, bias, activation)
        return self.compute(x, bias, activation)

    def compute(self, x: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Compute `product`, outside graphs."""
        fused = FUSED.get(activation)
        # A row is multiplied without the cost of reshaping.
        if self.layout == "onednn" and fused is not None and x.numel() <= ROW_STEP * x.shape[-1]:
            name, variant = fused
            return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, bias, name, [], variant)
        rows = x.reshape(-1, x.shape[-1])
        if self.layout == "onednn":
            y = onednn_product(rows, self.packed, bias)
        elif self.layout == "row":
            y = rows @ self.packed if bias is None else torch.addmm(bias, rows, self.packed)
        else:
            y = self._mkl_product(rows, bias)
        y = y.view(*x.shape[:-1], -1)
        return y if activation is None else ACTIVATIONS[activation](y)

    def _mkl_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute with MKL, which expects the number of rows for which it packed the weight."""
        missing = self.rows - len(x)
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        y = torch.ops.mkl._mkl_linear.default(x, self.packed, self.sized, bias, self.rows)
        return y[: self.rows - missing] if missing else y


_library = torch.library.Library("polyformer", "DEF")
_library.define("packed_product(Tensor x, Tensor key, Tensor sized, Tensor? bias, str? activation) -> Tensor")


def _packed_product(
    x: Tensor, key: Tensor, sized: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Compute `PackedWeight.product` in a compiled graph, which takes no tensors in a library's layout."""
    weight: PackedWeight = graph_object(key)
    return weight.compute(x, bias, activation)


_library.impl("packed_product", _packed_product, "CPU")


@torch.library.register_fake("polyformer::packed_product", lib=_library)
def _(x: Tensor, key: Tensor, sized: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(sized))


def _measure() -> LayoutConfig:
    """Return the fastest layouts for products with a weight that is read from memory, not from a cache."""
    if not torch.backends.mkldnn.is_available():
        return LayoutConfig()
    several: Layout = "mkl" if torch.backends.mkl.is_available() else "onednn"
    return LayoutConfig(single=_faster(1, "row"), several=_faster(SEVERAL, several))


def _faster(rows: int, layout: Layout) -> Layout:
    """Return `layout` if it is faster than oneDNN's by `FASTER` for this number of rows, else oneDNN's."""
    weight = torch.full(SHAPE, 0.5, device="cpu", dtype=torch.float32)
    x = torch.full((rows, SHAPE[1]), 0.5, device="cpu", dtype=torch.float32)
    names: tuple[Layout, ...] = ("onednn", layout)
    calls = {name: functools.partial(PackedWeight.of(weight, name, rows).product, x, None) for name in names}
    least = least_seconds(calls, ROUNDS, before=cache_emptier())
    return layout if layout == "onednn" or least["onednn"] > FASTER[layout] * least[layout] else "onednn"


LAYOUTS = Section("weight layouts", LayoutConfig(), _measure)


PACKED_LIMIT = 2 << 30
"""The most bytes of packed copies per model."""

SMALL_WEIGHT = 1 << 16
"""The largest weight without a copy: its product takes less than the 10 microseconds that a oneDNN call
costs.

A loop reads larger weights from memory, where a packed copy is the fastest.
"""

RUN = 1021
"""The number of words in each checksum that detects changes of a weight.

A prime, so that runs end at different places in every row: exchanged rows, columns or heads change the sums
too.
"""


class PackedCopies:
    """Copies of weights in the memory layout that is read the fastest for few rows (`LAYOUTS`).

    A copy costs its weight's memory or twice as much, and the time of about twenty products. The owner of
    this object keeps the copies alive, and must call `drop_changed` before weights that may have changed are
    read again.
    """

    def __init__(self, limit: int = PACKED_LIMIT):
        self.limit = limit
        self.kept: dict[tuple[int, ...], PackedCopy] = {}  # by the ids of weights and biases

    def of(
        self, rows: int, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()
    ) -> "PackedCopy | None":
        """Return a copy of the stacked weights [O, I] and biases [O] for `rows` rows; None beyond the limit.

        A copy in another layout, or for fewer rows, is replaced.
        """
        key = tuple(id(tensor) for tensor in (*weights, *biases) if tensor is not None)
        layout = LAYOUTS().layout(rows, weights[0].dtype)
        copy = self.kept.get(key)
        if copy is not None and copy.packed.layout == layout and copy.packed.serves(rows):
            return copy
        self.kept.pop(key, None)
        size = sum(weight.nbytes for weight in weights) + sum(other.size for other in [*self.kept.values()])
        if size > self.limit:
            return None
        copy = self.kept[key] = _copied(weights, biases, layout, rows)
        return copy

    def drop_changed(self, parameters: Iterable[Tensor]) -> None:
        """Drop copies of weights that are no longer among `parameters`, or that have changed since.

        All bits are read again, which takes half the time of a token, because some ways to write to a tensor
        (through `.data`, numpy, another process) do not change its version.
        """
        present = {id(parameter) for parameter in parameters}
        for key, copy in list(self.kept.items()):
            if not (present.issuperset(key) and copy.is_current()):
                self.kept.pop(key, None)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedCopy:
    """A copy of stacked weights and biases. sources: the originals. sums: checksums of their bits."""

    sources: tuple[Tensor, ...]
    sums: list[Tensor]
    packed: PackedWeight
    bias: Tensor | None

    @property
    def size(self) -> int:
        """The bytes of the copy."""
        return self.packed.nbytes

    def is_current(self) -> bool:
        """Return whether the originals have not changed."""
        return all(torch.equal(old, _sums(weight)) for old, weight in zip(self.sums, self.sources))


def _copied(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], layout: Layout, rows: int
) -> PackedCopy:
    """Copy weights and biases, stacked, into a layout for `rows` rows."""
    sources = (*weights, *(bias for bias in biases if bias is not None))
    sums = [_sums(tensor) for tensor in sources]  # before copying, so that a write in between is detected
    joint = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
    bias = stacked_bias(biases, [*map(len, weights)])
    return PackedCopy(sources, sums, PackedWeight.of(joint, layout, rows), bias)


def _sums(weight: Tensor) -> Tensor:
    """Return checksums of the runs of a weight or bias.

    Empty for a dtype that is not packed, and for a tensor that is no longer on a CPU.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        return torch.empty(0)
    weight = weight.detach()
    transposed = weight.t()
    flat = (transposed if transposed.is_contiguous() else weight).reshape(-1)
    word = 8 // weight.itemsize
    if flat.numel() % word or flat.storage_offset() % word:
        flat = F.pad(flat, (0, -flat.numel() % word)).clone()
    words = flat.view(torch.int64)
    runs = words[: len(words) // RUN * RUN].view(-1, RUN).sum(1)
    return torch.cat([runs, words[len(runs) * RUN :].sum(0, keepdim=True)])


_copies_of: "WeakKeyDictionary[nn.Module, PackedCopies]" = WeakKeyDictionary()


def packed_copies(model: nn.Module) -> PackedCopies:
    """Return the copies that live as long as the model, without copies of changed weights."""
    copies = _copies_of.setdefault(model, PackedCopies())
    copies.drop_changed(model.parameters())
    return copies


Choice = tuple[bool, PackedWeight | None]
"""How to compute with a weight: by its copy, or without one, by oneDNN or not."""


class PackedWeights(LinearBackend):
    """A loop of small products of one dtype on one device, such as decoding; its weights must not change.

    Inside `with packed:` every product outside autograd uses the library chosen for the first product of its
    weight, without choosing again: with `copies` of the weights for products of up to `rows` rows, made when
    first needed, or without copies from the weights themselves. Layers that read the same input (`linears`)
    are one product.
    """

    def __init__(self, copies: PackedCopies | None, rows: int = 1):
        self.copies, self.rows = copies, rows
        self.joints: dict[int, PackedCopy | None] = {}  # by id of the first layer; None: separately
        self.choices: dict[int, Choice] = {}  # by id of the weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the same as the function `linear`."""
        return self._product(x, weight, bias, None)

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
        """Compute the same as the function `linears`; with copies, through one copy of all weights."""
        plain = [layer for layer in layers if is_plain(layer)]
        if len(plain) == len(layers) and all(_is_compiled_row(x, layer.weight) for layer in plain):
            return [row_product(x, layer.weight, layer.bias) for layer in plain]
        if x.numel() and id(layers[0]) not in self.joints:
            weights, biases = [layer.weight for layer in plain], [layer.bias for layer in plain]
            joins = len(plain) == len(layers)  # layers with hooks run separately
            self.joints[id(layers[0])] = self._copy(x, weights, biases) if joins else None
        joint = self.joints.get(id(layers[0]))
        if joint is None:
            return [layer(x) for layer in layers]
        if not joint.packed.serves(_rows(x)):  # single layers have no copies
            return [_without_copy(x, layer.weight, layer.bias) for layer in plain]
        sizes = [layer.out_features for layer in plain]
        return joint.packed.product(x, joint.bias).split_with_sizes(sizes, -1)

    def activated(self, x: Tensor, layer: nn.Module, activation: str) -> Tensor:
        """Compute the same as the function `activated`; in one step if oneDNN computes the product."""
        if is_plain(layer):
            return self._product(x, layer.weight, layer.bias, activation)
        return ACTIVATIONS[activation](layer(x))

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Return the activation of x [..., I] times weight [O, I] transposed, plus the bias: [..., O]."""
        if _is_compiled_row(x, weight):
            y = row_product(x, weight, bias)
            return y if activation is None else ACTIVATIONS[activation](y)
        onednn, copy = self.choices.get(id(weight)) or self._choose(x, weight)
        if copy is not None and copy.serves(_rows(x)):
            return copy.product(x, bias, activation)
        y = _without_copy(x, weight, bias, onednn)
        return y if activation is None else ACTIVATIONS[activation](y)

    def _choose(self, x: Tensor, weight: Tensor) -> Choice:
        """Choose how to compute with a weight; judged by one row, as a long prompt is not typical.

        Weights that are not parameters may be freed and their ids reused, so they are not stored. An empty
        input (of an expert without tokens) says nothing about later inputs.
        """
        onednn = by_onednn(_row(x), weight)
        if not isinstance(weight, nn.Parameter) or not x.numel():
            return onednn, None
        copy = self._copy(x, [weight])
        choice = self.choices[id(weight)] = onednn, None if copy is None else copy.packed
        return choice

    def _copy(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()
    ) -> PackedCopy | None:
        """Return the copy of weights for products with inputs like x; None if there is no copy."""
        large = sum(weight.numel() for weight in weights) > SMALL_WEIGHT
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 and packs_bfloat16() else torch.float32
        if self.copies is None or not large or not onednn_takes(_row(x), weights[0], dtype):
            return None
        return self.copies.of(self.rows, weights, biases)


@functools.cache
def packs_bfloat16() -> bool:
    """Return whether oneDNN has products of bfloat16 here."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _without_copy(x: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool | None = None) -> Tensor:
    """Return x times weight transposed, plus bias, by oneDNN or by BLAS; by default the faster."""
    if onednn is None:
        onednn = by_onednn(x, weight)
    return onednn_linear(x, weight, bias) if onednn else F.linear(x, weight, bias)


def _is_compiled_row(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's compiler gets this product, and x [..., I] is a single row."""
    return (
        is_recorded()
        and x.is_cpu
        and x.numel() == x.shape[-1]
        and x.dtype == weight.dtype
        and weight.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
    )


def _row(x: Tensor) -> Tensor:
    """Return the first row [1, I] of x [..., I], if there is one."""
    return x.reshape(-1, x.shape[-1])[:1]


def _rows(x: Tensor) -> int:
    """Return the number of rows of x [..., I]."""
    return x.numel() // x.shape[-1]
