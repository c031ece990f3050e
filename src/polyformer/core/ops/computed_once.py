"""A value that compiled code computes once, before the loops that read it.

torch's compiler joins operations to the loop that reads their result. If each turn of a loop reads the same
numbers, they would be computed again in each turn.
"""

import functools
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("polyformer", "FRAGMENT")
_library.define("computed_once(Tensor x) -> Tensor")


def computed_once(x: Tensor) -> Tensor:
    """Return x, which a graph that is compiled for a CPU stores before it is read."""
    return torch.ops.polyformer.computed_once.default(x)


_library.impl("computed_once", torch.clone, "CPU")


@torch.library.register_fake("polyformer::computed_once", lib=_library)
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@functools.cache
def register_lowering() -> None:
    """Let torch's compiler store the value; the import takes a second."""
    from torch._inductor.lowering import register_lowering

    def lower(x: Any) -> Any:
        x.realize()
        return x

    register_lowering(torch.ops.polyformer.computed_once.default, type_promotion_kind=None)(lower)
