"""Patterns with a step: tokens by residue class give what the definition gives, in far fewer scores."""

import itertools

import pytest
import torch
from torch import Tensor

from attention_cases import LargestTensor, random_context
from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.splits import alternatives, disjoint_by_step
from polyformer.attention.patterns import Fixed, Global, Pattern, PerHead, Strided, Window
from polyformer.attention.patterns.implied import Full
from polyformer.core.sequence.context import Context

PATTERNS = [
    Window(3, dilation=3),
    Window(4, 0) | Strided(5),
    Window(2, 1, dilation=2) | Global(2),
    (Window(6) | Strided(7)) & Window(30),
    Strided(3) | Strided(4),
    Strided(2) & Strided(3) | Fixed(8, 2),
    Window(2, dilation=4) & Strided(8) | Window(1),
    PerHead([Window(2, dilation=2), Strided(6)]),
]


def both(pattern: Pattern, context: Context, kv_heads: int = 2, **options: object) -> list[list[Tensor]]:
    """Output, log-sum-exp and gradients of q, k, v through `tiled` and through the definition."""
    torch.manual_seed(0)
    lengths = (4, context.q_len), (kv_heads, context.kv_len), (kv_heads, context.kv_len)
    q, k, v = (torch.randn(2, *shape, 5, dtype=torch.float64, requires_grad=True) for shape in lengths)
    results = []
    for backend in ("tiled", "definition"):
        y, lse = attend(
            q, k, v, pattern=pattern, context=context, backend=backend, return_lse=True, **options
        )  # type: ignore[call-overload]
        loss = (y * torch.arange(y.numel()).view_as(y).cos()).sum() + lse.masked_fill(
            lse < -99, 0
        ).sin().sum()
        results.append([y, lse, *torch.autograd.grad(loss, [q, k, v])])
    return results


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(43, 43), (38, 55)])
def test_residue_classes_are_the_definition(pattern: Pattern, queries: int, keys: int) -> None:
    torch.manual_seed(1)
    for causal, documents, padding in itertools.product([False, True], repeat=3):
        context = random_context(2, queries, keys, causal=causal, documents=documents, padding=padding)
        for actual, expected in zip(*both(pattern, context)):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_score_functions_and_relative_terms_find_their_tokens(pattern: Pattern) -> None:
    context = Context(38, 55, causal=True)
    table = torch.randn(4, 55, dtype=torch.float64)
    distances = context.distances[1] + 1
    relative = Relative(
        first=0,
        bias=torch.randn(4, distances, dtype=torch.float64),
        position_keys=torch.randn(1, distances, 5, dtype=torch.float64),
        content=torch.randn(2, 4, 38, 5, dtype=torch.float64),
        position_values=torch.randn(4, distances, 5, dtype=torch.float64),
    )
    options = {"relative": relative, "score_mod": lambda s, b, h, i, j: s + table[h, j] * (b + i % 3)}
    for actual, expected in zip(*both(pattern, context, **options)):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_alternatives_are_grouped_by_step() -> None:
    pattern = (Window(4, 0) | Strided(5) | Window(2, dilation=5) | Strided(7)) & Full()
    assert len(alternatives(pattern)) == 4
    parts = disjoint_by_step(pattern, queries=40)
    assert parts is not None
    assert list(parts) == [1, 5, 7]
    assert disjoint_by_step(pattern, queries=9) is None, "too few queries for residue classes of 5"


def test_a_part_leaves_out_what_others_have_seen() -> None:
    """Distance 0 and 5 are in both: counted twice they would weigh twice."""
    q = torch.randn(1, 1, 40, 4, dtype=torch.float64)
    both_ways = [
        attend(q, q, q, pattern=Window(5, 0) | Strided(5), backend=name) for name in ("tiled", "definition")
    ]
    torch.testing.assert_close(*both_ways)


def test_the_scores_of_a_strided_pattern_are_few() -> None:
    length, stride = 1 << 14, 128
    q = torch.randn(1, 1, length, 4)
    with LargestTensor() as seen:
        attend(q, q, q, pattern=Strided(stride), context=Context(length, length, causal=True))
    assert seen.largest <= length * (length // stride)
