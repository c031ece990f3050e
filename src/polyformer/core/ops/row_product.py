"""The product of a single row with a weight, for graphs that torch compiles for a CPU.

The compiled code is a loop over the weight as it is, joined with the operations behind it. It reads memory
faster than a library does, and a call of the library also costs 20 microseconds.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from polyformer.core.ops.cpu import use_huge_pages

_library = torch.library.Library("polyformer", "FRAGMENT")
_library.define("row_product(Tensor x, Tensor weight) -> Tensor")


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., I] of a single row times weight [O, I] transposed, plus bias [O]: [..., O].

    weight: contiguous.
    """
    use_huge_pages(weight.data_ptr(), weight.nbytes)
    y = torch.ops.polyformer.row_product.default(x.reshape(-1), weight)
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


def _row_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the product outside compiled code, which is when a graph is recorded."""
    return torch.mv(weight, x)


_library.impl("row_product", _row_product, "CPU")


@torch.library.register_fake("polyformer::row_product", lib=_library)
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(weight))


@functools.cache
def register_lowering() -> None:
    """Let torch's compiler compute the product; the import takes a second."""
    from torch._inductor.lowering import lowerings, register_lowering, to_dtype

    aten = torch.ops.aten

    def lower(x: Any, weight: Any) -> Any:
        x.realize()  # else the operations before would be repeated for every output
        wide = torch.promote_types(x.get_dtype(), torch.float32)
        products = lowerings[aten.mul.Tensor](to_dtype(weight, wide), to_dtype(x, wide))
        return to_dtype(lowerings[aten.sum.dim_IntList](products, [1]), x.get_dtype())

    register_lowering(torch.ops.polyformer.row_product.default, type_promotion_kind=None)(lower)
