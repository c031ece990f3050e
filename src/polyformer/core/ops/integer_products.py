"""Sums of integers with int8 weights, exact, by the libraries of torch for x86:

y_no = scale_o sum_i w_oi p_ni,    w in -127 .. 127,    p in -levels .. levels

fbgemm   levels 63: with AVX2 it adds pairs of products in 16 bits
onednn   levels 127, with instructions for bytes (VNNI or AMX); without them its sums overflow
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from polyformer.core.host_values import is_recorded
from polyformer.core.recorded_graph import GraphObject, graph_object

LibraryName = Literal["fbgemm", "onednn"]

ENGINES = "x86", "fbgemm"
"""The FBGEMM engines among torch's quantized engines."""

PACKED_FOR = 16
"""The rows for which oneDNN chooses its layout: two parts each of eight texts."""


@dataclasses.dataclass(frozen=True, eq=False)
class PackedIntegers(GraphObject):
    """A weight [O, I] in the format of a library."""

    library: "Library"
    packed: Any
    scale: Tensor

    def product(self, high: Tensor, low: Tensor) -> Sequence[Tensor]:
        """Return y [N, O] for two p [N, I]: float32 numbers, which are integers plus the library's offset.

        low is rounded to integers.
        """
        parts = torch.cat([high, low])
        if self.library.offset:  # here, so that torch's compiler joins it with the operations before
            parts = parts.add_(0.5).to(torch.uint8)
        if is_recorded():
            y = torch.ops.polyformer.integer_product.default(parts, self.key, self.scale)
        else:
            y = self.library.multiply(parts, self.packed, self.scale)
        return y.chunk(2)


@dataclasses.dataclass(frozen=True)
class Library:
    """A library. levels: the largest integer of an input. offset: what is added to every integer.

    pack takes integers [O, I] and scales [O]; multiply takes p, the result of pack, and the scales.
    """

    levels: int
    offset: int
    pack: Callable[[Tensor, Tensor], Any]
    multiply: Callable[[Tensor, Any, Tensor], Tensor]

    @functools.cached_property
    def start(self) -> Tensor:
        """The offset as a tensor."""
        return torch.tensor(float(self.offset), device="cpu", dtype=torch.float32)

    def packed(self, weight: Tensor, scale: Tensor) -> PackedIntegers:
        """Return a weight [O, I] and its scales [O] in the library's format."""
        scale = scale.float()
        return PackedIntegers(self, self.pack(weight, scale), scale)

    @functools.cached_property
    def is_exact(self) -> bool:
        """Whether torch has the library, and no sum overflows on this processor."""
        p = self.levels * torch.tensor([[1.0], [-1.0]]).expand(2, 64)
        weight = torch.full((2, 64), 127, dtype=torch.int8)
        try:
            y, _ = self.packed(weight, torch.ones(2)).product(p + self.offset, p + self.offset)
        except (RuntimeError, AttributeError, NotImplementedError):
            return False
        return torch.equal(y, p @ weight.float().T)


def _pack_fbgemm(weight: Tensor, scale: Tensor) -> Any:
    with warnings.catch_warnings():  # torch deprecates these tensors; `is_exact` checks that they exist
        warnings.simplefilter("ignore", UserWarning)
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        tensor = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)  # type: ignore[attr-defined]
        return torch.ops.quantized.linear_prepack(tensor, None)


def _multiply_fbgemm(parts: Tensor, packed: Any, scale: Tensor) -> Tensor:
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(parts, 1.0, 64, packed)


def _pack_onednn(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    packed = torch.ops.onednn.qlinear_prepack(weight, [PACKED_FOR, weight.shape[1]])
    return packed, torch.zeros(len(weight), dtype=torch.int64)


def _multiply_onednn(parts: Tensor, packed: tuple[Tensor, Tensor], scale: Tensor) -> Tensor:
    weight, zeros = packed
    output = None, 1.0, 0, torch.float32, "none", [], ""
    return torch.ops.onednn.qlinear_pointwise.default(parts, 1.0, 128, weight, scale, zeros, *output)


LIBRARIES: dict[LibraryName, Library] = {
    "fbgemm": Library(63, 0, _pack_fbgemm, _multiply_fbgemm),
    # Without AMX it multiplies only bytes without a sign fast.
    "onednn": Library(127, 128, _pack_onednn, _multiply_onednn),
}


def has_integer_products() -> bool:
    """Return whether FBGEMM has exact products here, and the current engine can pack for them."""
    return torch.backends.quantized.engine in ENGINES and LIBRARIES["fbgemm"].is_exact


_library = torch.library.Library("polyformer", "FRAGMENT")
_library.define("integer_product(Tensor parts, Tensor key, Tensor scale) -> Tensor")


def _integer_product(parts: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    """Compute `PackedIntegers.product` in a graph."""
    weight: PackedIntegers = graph_object(key)
    return weight.library.multiply(parts, weight.packed, scale)


_library.impl("integer_product", _integer_product, "CPU")


@torch.library.register_fake("polyformer::integer_product", lib=_library)
def _(parts: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    return scale.new_empty(len(parts), len(scale))
