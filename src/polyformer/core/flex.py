"""Compiled FlexAttention on CUDA, with a BlockMask made from the layout, never by evaluating the mask densely."""

from torch import Tensor

from polyformer.core.request import Request


def refuses(request: Request, return_lse: bool) -> str | None:
    """Why this backend cannot take the request, or None."""
    if request.q.device.type != "cuda":
        return "FlexAttention has no backward on this device"
    return None


def run(request: Request) -> tuple[Tensor, Tensor]:
    raise NotImplementedError
