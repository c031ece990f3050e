"""Disentangled positions: buckets are transformers', and the tables are the paper's equation.

Whole encoders of all versions are compared in test_families.
"""

import dataclasses
from typing import Any

import pytest
import torch
from families import same

from polyformer.attention.positions import DebertaConfig, Shape
from polyformer.attention.positions.deberta import log_buckets
from polyformer.core.sequence.context import Context

v2 = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")


@pytest.mark.parametrize(("buckets", "reach"), [(256, 512), (4, 19), (4, 9), (6, 100), (32, 128), (8, 64)])
def test_log_buckets_are_theirs(buckets: int, reach: int):
    distance = torch.arange(-3 * reach, 3 * reach + 1)
    expected = v2.make_log_bucket_position(distance, buckets, reach)
    torch.testing.assert_close(log_buckets(distance, buckets, reach), expected.long(), rtol=0, atol=0)
    assert int(log_buckets(torch.tensor(reach - 1), buckets, reach)) == buckets - 1


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_tables_are_the_equation(causal: bool, mirrored: bool):
    """Equation 4 written pair by pair, with delta as section 3.1 defines it."""
    config = DebertaConfig(max_relative_positions=3, mirrored=mirrored)
    position = config.build(Shape(hidden_size=8, num_layers=2, num_heads=2, head_size=4)).double()
    torch.manual_seed(2)
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    q, k, k_first = (torch.randn(1, 2, 7, 4).double() for _ in range(3))
    context = Context(7, 7, causal=causal)
    site: Any = dataclasses.make_dataclass("OfLayer", ["layer"])(1)
    rotated, untouched = position.rotate(q, k_first, context, site)
    assert untouched is k_first
    relative = position.relative(rotated, k, context, site)
    i, j = torch.arange(7).view(-1, 1), torch.arange(7)
    zero = torch.zeros(1, 2, 7, 7).double()
    actual = relative.score_mod(rotated, k, 0.5, context)(
        zero, torch.zeros(1, 1, 1, 1).long(), torch.arange(2).view(1, 2, 1, 1), i, j
    )

    def delta(a: int, b: int) -> int:
        return 0 if a - b <= -3 else 5 if a - b >= 3 else a - b + 3

    rows = position.table.weight
    kr = (rows @ position.keys[1].weight.T).view(6, 2, 4)
    qr = (rows @ position.queries[1].weight.T + position.queries[1].bias).view(6, 2, 4)
    for a in range(7):
        for b in range(a + 1 if causal else 7):
            at = delta(b, a) if mirrored else delta(a, b)
            for head in range(2):
                term = q[0, head, a] @ kr[delta(a, b), head] + k[0, head, b] @ qr[at, head]
                same(actual[0, head, a, b], term / (3 * 4) ** 0.5)
