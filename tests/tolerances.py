"""How far two computations of the same numbers may differ."""

from typing import Any

import torch
from torch import Tensor


class Double:
    """torch for a module of transformers that computes a part in float32 in every precision: here float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def with_exact_waves(model: Any) -> Any:
    """Return a GPT-J of transformers with its tables of sines in float64, which it makes in float32."""
    even = torch.arange(0, model.config.rotary_dim, 2, dtype=torch.float64)
    angles = torch.arange(model.config.n_positions).unsqueeze(1) * 10000.0 ** (
        -even / model.config.rotary_dim
    )
    for layer in getattr(model, "transformer", model).h:
        layer.attn.embed_positions = torch.cat([angles.sin(), angles.cos()], 1)
    return model


def assert_rounded(actual: Tensor, single: Tensor, exact: Tensor, times: float = 8) -> None:
    """Assert that `actual` differs from `exact` by rounding only.

    single, exact: the reference on the same input in the precision of `actual` and in float64.

    Two ways to compute the same numbers from the same inputs differ in the order of their roundings. Each has
    an error of about eps times what the problem makes of it, its condition, which is the same for both. So
    |single - exact| measures that error on this machine, and `actual` may have `times` as much, for its sums
    may be longer or in another order. The greatest error over all entries counts, as single entries of the
    reference are right by chance. The reference as a whole may be, too, so eps times the largest entry is
    added: half of it is what writing the result down costs.
    """

    def greatest(x: Tensor) -> float:
        return float(x.detach().abs().max()) if x.numel() else 0.0

    assert exact.dtype == torch.float64
    floor = torch.finfo(actual.dtype).eps * greatest(exact)
    limit = times * greatest(single.double() - exact) + floor
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=limit)
