"""DeBERTa's scores in half precision, a fault elsewhere: products beyond float16's range stay finite."""

import pytest
import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.relative import Relative
from polyformer.attention.positions import DebertaConfig, Shape, Site
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

HEADS, WIDTH, LENGTH = 2, 16, 21
HALF = [
    pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.float16, torch.bfloat16)
]


def by_head(rows: Tensor) -> Tensor:
    return rows.unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)


def terms(q: Tensor, k: Tensor) -> tuple[Tensor, Relative, Context]:
    """Scaled queries, and the terms of a table whose kr and qr are as large as the queries and along them."""
    shape = Shape(hidden_size=HEADS * WIDTH, num_heads=HEADS, head_size=WIDTH)
    position = DebertaConfig(max_relative_positions=4, share_projections=True).build(shape).to(q.dtype)
    with torch.no_grad():
        sizes = torch.linspace(0.5, 1, 8).unsqueeze(1)
        position.get_parameter("table.weight").copy_(q[0, :, 0].flatten() * sizes)
    context, site = Context(LENGTH, LENGTH), Site(0, by_head, by_head)
    scaled, _ = position.rotate(q, k, context, site)
    relative = position.relative(scaled, k, context, site)
    assert relative is not None
    return scaled, relative, context


def out(dtype: torch.dtype, backend: str, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Output of disentangled attention in `dtype`, and the gradient of its sum of squares in the queries."""
    q, k, v = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    scaled, relative, context = terms(q, k)
    y = attend(scaled, k, v, relative=relative, context=context, backend=backend)
    return y.detach(), torch.autograd.grad(y.square().sum(), q)[0]


def large() -> list[Tensor]:
    """q, k, v whose every score term is beyond float16 before its division by sqrt(D), though not after."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, HEADS, LENGTH, WIDTH) for _ in range(3))
    q, k = q[:1, :, :1].sign().expand_as(q) * 128, k.sign() * 128
    k[:, :, ::3] = q[:, :, ::3]
    assert q[0, 0, 0].square().sum() * 0.5 * 3**-0.5 > torch.finfo(torch.float16).max
    return [q, k, v]


@pytest.mark.parametrize("backend", ["tiled", "definition"])
@pytest.mark.parametrize("dtype", HALF)
def test_large_scores_stay_finite_in_half_precision(dtype: torch.dtype, backend: str):
    tensors = large()
    y, slope = out(dtype, backend, tensors)
    assert y.isfinite().all()
    assert slope.isfinite().all()
    exact, _ = out(torch.float64, "definition", tensors)
    assert (y.double() - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("dtype", HALF)
def test_terms_stay_finite_as_a_score_mod(dtype: torch.dtype):
    """What a backend that computes in half precision looks up."""
    q, k, _ = (tensor.to(dtype) for tensor in large())
    scaled, relative, context = terms(q, k)
    add = relative.score_mod(scaled, k, WIDTH**-0.5, context)
    index = torch.arange(LENGTH)
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(HEADS).view(1, HEADS, 1, 1)
    assert add(torch.zeros(2, HEADS, LENGTH, LENGTH), b, h, index.view(-1, 1), index).isfinite().all()


def test_wrong_options_are_named():
    for options, said in (
        ({"max_relative_positions": 0}, "max_relative_positions: expected 1 or more, got 0"),
        ({"terms": ("p2p",)}, r"terms: expected one or both of \('c2p', 'p2c'\), got \('p2p',\)"),
        ({"terms": ()}, "terms: expected one or both"),
        ({"terms": ("c2p", "c2p")}, "terms: expected one or both"),
        ({"buckets": 5}, "buckets: expected an even number of 4 or more, or None, got 5"),
        ({"dropout": 1.0}, r"dropout: expected a probability in \[0, 1\), got 1.0"),
    ):
        with pytest.raises(InputError, match=said):
            DebertaConfig(**options)
    with pytest.raises(InputError, match="max_relative_positions: 8 buckets need 6 tokens or more, got 5"):
        DebertaConfig(max_relative_positions=5, buckets=8).build(Shape(hidden_size=8))


def test_dropout_falls_on_the_table_in_training_alone():
    position = DebertaConfig(max_relative_positions=4, dropout=0.5).build(Shape(hidden_size=8, head_size=8))
    context, site = Context(5, 5), Site(0, lambda x: x, lambda x: x)
    x = torch.zeros(1, 1, 5, 8)

    def keys() -> Tensor:
        relative = position.relative(x, x, context, site)
        assert relative.position_keys is not None
        return relative.position_keys

    assert not torch.equal(keys(), keys())
    position.eval()
    assert torch.equal(keys(), keys())
