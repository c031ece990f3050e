"""Relative terms: the definition against the equation written out, every backend against the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import LargestTensor
from pairwise import pairwise
from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.functional.relative import TABLES, Relative
from polyformer.attention.patterns import Global, Pattern, Window
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

ALL = (*TABLES, "content")
CASES = [
    ("bias",),
    ("position_keys",),
    ("position_keys", "content"),
    ("position_queries",),
    ("position_values",),
    ALL,
]


def inputs(rows: int, heads: int, kv_heads: int, queries: int, keys: int, width: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (rows, heads, queries, width), (rows, kv_heads, keys, width), (rows, kv_heads, keys, width)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def terms(names: tuple[str, ...], q: Tensor, context: Context, shared: bool) -> dict[str, Tensor]:
    least, greatest = context.distances
    size, heads = greatest - least + 1, 1 if shared else q.shape[1]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(TABLES, (heads, size, q.shape[3]))
    shapes |= {"bias": (heads, size), "content": tuple(q.shape)}
    return {name: torch.randn(shapes[name], dtype=q.dtype, requires_grad=True) for name in names}


def results(
    tensors: list[Tensor], tables: dict[str, Tensor], context: Context, **options: Any
) -> list[Tensor]:
    relative = Relative(first=context.distances[0], **tables)
    y, lse = attend(*tensors, relative=relative, context=context, return_lse=True, **options)
    torch.manual_seed(1)
    loss = (y * torch.randn_like(y)).sum() + lse.masked_fill(lse == -torch.inf, 0).sin().sum()
    return [y, lse, *torch.autograd.grad(loss, [*tensors, *tables.values()])]


@pytest.mark.parametrize("causal", [False, True])
def test_the_definition_is_the_equation(causal: bool) -> None:
    q, k, v = inputs(2, 3, 3, 4, 7)
    context = Context(4, 7, causal=causal)
    tables = terms(ALL, q, context, shared=False)
    computed = results([q, k, v], tables, context, backend="definition")[0]
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        seen = [j for j in range(7) if not causal or j <= i + 3]
        d = [i + 3 - j - context.distances[0] for j in seen]
        score = torch.stack(
            [
                (
                    q[b, h, i] @ k[b, h, j]
                    + tables["content"][b, h, i] @ tables["position_keys"][h, r]
                    + tables["position_queries"][h, r] @ k[b, h, j]
                )
                / 5**0.5
                + tables["bias"][h, r]
                for j, r in zip(seen, d)
            ]
        )
        values = torch.stack([v[b, h, j] + tables["position_values"][h, r] for j, r in zip(seen, d)])
        torch.testing.assert_close(computed[b, h, i], score.softmax(0) @ values)


@pytest.mark.parametrize(
    ("names", "shared", "pattern", "causal"),
    pairwise(CASES, [False, True], [None, Window(20), Window(9, 0) | Global(2)], [False, True]),
)
def test_tiled_is_the_definition(
    names: tuple[str, ...], shared: bool, pattern: Pattern | None, causal: bool
) -> None:
    for rows, heads, kv_heads, queries, keys in ((2, 4, 2, 70, 81), (2, 3, 1, 1, 33)):
        tensors = inputs(rows, heads, kv_heads, queries, keys)
        context = Context(queries, keys, causal=causal)
        tables = terms(names, tensors[0], context, shared)
        both = [
            results(tensors, tables, context, pattern=pattern, backend=variant)
            for variant in ("tiled", "definition")
        ]
        for actual, expected in zip(*both):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_a_score_mod_comes_after_the_terms() -> None:
    tensors = inputs(1, 2, 2, 40, 40)
    context = Context(40, 40, causal=True)
    tables = terms(ALL, tensors[0], context, shared=False)

    def cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 2 * torch.tanh(score / 2)

    both = [
        results(tensors, tables, context, score_mod=cap, backend=variant)
        for variant in ("tiled", "definition")
    ]
    for actual, expected in zip(*both):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(both[0][0], results(tensors, tables, context, backend="tiled")[0])


@pytest.mark.parametrize("threads", [1, 3])
def test_gradients_of_shared_tables_are_summed_over_rows_heads_and_threads(threads: int) -> None:
    tensors = inputs(3, 2, 2, 300, 300, width=4)
    context = Context(300, 300)
    tables = terms(ALL, tensors[0], context, shared=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        computed = results(tensors, tables, context, pattern=Window(30), backend="tiled")
    finally:
        torch.set_num_threads(before)
    for actual, expected in zip(
        computed, results(tensors, tables, context, pattern=Window(30), backend="definition")
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_gradients_arrive_whatever_the_order_of_axes_in_memory() -> None:
    tensors = inputs(2, 3, 3, 40, 40)
    context = Context(40, 40)
    tables = terms(("position_keys", "content"), tensors[0], context, shared=False)
    transposed = tables["content"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    both = [
        results(tensors, {**tables, "content": variant}, context, backend="tiled")
        for variant in (tables["content"], transposed)
    ]
    for actual, expected in zip(*both):
        torch.testing.assert_close(actual, expected)


def test_nothing_is_dense() -> None:
    length = 3000
    q, k, v = (torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))
    context = Context(length, length)
    relative = Relative(
        first=1 - length,
        position_keys=torch.randn(1, 2 * length - 1, 4, requires_grad=True),
        position_values=torch.randn(1, 2 * length - 1, 4),
    )
    with LargestTensor() as seen:
        attend(q, k, v, pattern=Window(16), relative=relative, context=context).sum().backward()
    assert seen.largest <= 100 * length  # a square would be 3000 times the length


def test_half_precision_is_computed_in_float32() -> None:
    tensors = [x.detach().bfloat16() for x in inputs(1, 2, 2, 50, 50)]
    context = Context(50, 50)
    tables = {name: x.detach().bfloat16() for name, x in terms(ALL, tensors[0], context, False).items()}
    relative = Relative(first=-49, **tables)
    y = attend(*tensors, relative=relative, context=context, backend="tiled")
    expected = attend(*(x.double() for x in tensors), relative=relative.to(torch.float64), context=context)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)


def test_what_a_backend_cannot_carry_it_says() -> None:
    q, k, v = inputs(1, 1, 1, 4, 4)
    relative = Relative(first=-3, bias=torch.zeros(1, 7))
    choice = explain(q, k, v, relative=relative)
    assert str(choice).startswith(
        "tiled (not sdpa: a score_mod or relative terms change the scores; not flex"
    )
    with pytest.raises(InputError, match="backend 'sdpa' cannot take this call: a score_mod or relative"):
        attend(q, k, v, relative=relative, backend="sdpa")


def test_tables_of_different_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="relative: expected tables over the same distances"):
        Relative(first=0, bias=torch.zeros(1, 3), position_keys=torch.zeros(1, 4, 2))
