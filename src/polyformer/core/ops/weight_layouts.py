"""Layouts of weights for products with few rows, which take as long as reading the weight from memory.

    row       W^T, for BLAS's product of a single row with a matrix
    onednn    blocks of oneDNN, for any number of rows
    mkl       blocks of MKL, for a stated number of rows; up to twice the memory (x86)

No library is the fastest on every processor, so the layouts for one row and for several rows are measured.
"""

import dataclasses
import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.host_values import is_recorded
from polyformer.core.ops.activations import ACTIVATIONS
from polyformer.core.ops.huge_pages import use_huge_pages
from polyformer.core.ops.product_kernels import CLEARLY, ROW_STEP, onednn_product
from polyformer.core.ops.tuning import Section
from polyformer.core.ops.tuning.stopwatch import cache_emptier, least_seconds
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
