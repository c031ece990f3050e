"""Calls of one context without gradients: looked into once, and each as the definition says."""

import dataclasses

import pytest
import torch

from pairwise import pairwise
from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.functional.backends import sdpa
from polyformer.attention.functional.backends.tiled import run as tiled
from polyformer.attention.functional.relative import Relative
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context

VALID = torch.tensor([[False, False] + [True] * 7, [True] * 9])
CONTEXTS = {
    "one query": lambda: Context(1, 9, causal=True),
    "one query, padded": lambda: Context(1, 9, causal=True, kv_valid=VALID),
    "chunk": lambda: Context(4, 9, causal=True, kv_valid=VALID),
    "causal": lambda: Context(9, 9, causal=True),
    "causal, padded": lambda: Context(9, 9, causal=True, kv_valid=VALID),
    "encoder": lambda: Context(9, 9),
    "encoder, padded": lambda: Context(9, 9, kv_valid=VALID),
}


def inputs(context: Context, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 4, context.q_len, 6), (2, 2, 9, 6), (2, 2, 9, 6)
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k, v


def biases(context: Context, heads: int) -> Relative:
    least, greatest = context.distances
    generator = torch.Generator().manual_seed(9)
    table = torch.randn(heads, greatest - least + 1, dtype=torch.float64, generator=generator)
    return Relative(first=least, bias=table)


def vectors(context: Context, heads: int) -> Relative:
    """What queries meet by distance: other numbers in each call."""
    biased = biases(context, heads)
    assert biased.bias is not None
    generator = torch.Generator().manual_seed(8)
    keys = torch.randn(*biased.bias.shape, 6, dtype=torch.float64, generator=generator)
    return dataclasses.replace(biased, position_keys=keys)


@torch.no_grad()
@pytest.mark.parametrize(("heads", "terms", "name"), pairwise([None, 1, 4], [biases, vectors], [*CONTEXTS]))
def test_every_layer_gets_what_the_definition_says(name, terms, heads):
    context = CONTEXTS[name]()
    relative = None if heads is None else terms(context, heads)
    for seed, scale in enumerate((None, None, 0.7)):
        q, k, v = inputs(context, seed)
        got = attend(q, k, v, context=context, relative=relative, scale=scale)
        expected = attend(
            q, k, v, context=CONTEXTS[name](), relative=relative, scale=scale, backend="definition"
        )
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_few_vectors_of_distances_are_a_mask_of_torchs_kernel():
    q, k, v = inputs(CONTEXTS["chunk"](), 0)
    relative = dataclasses.replace(vectors(CONTEXTS["chunk"](), 4), content=q + 1)
    options = {"context": CONTEXTS["chunk"](), "relative": relative}
    assert explain(q, k, v, **options).backend == "sdpa"
    expected = attend(q, k, v, **options, backend="definition")
    torch.testing.assert_close(attend(q, k, v, **options), expected, rtol=1e-10, atol=1e-10)
    halves = relative.to(torch.bfloat16)
    options |= {"relative": halves}
    assert explain(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options).backend == "tiled", "sums are rounded"
    with torch.enable_grad():
        assert explain(q, k, v, **options | {"relative": relative}).backend == "tiled"


@torch.no_grad()
def test_a_call_is_looked_into_once(monkeypatch):
    seen = []
    refuses = sdpa.refuses
    monkeypatch.setattr(sdpa, "refuses", lambda *request: seen.append(1) or refuses(*request))
    context = CONTEXTS["one query, padded"]()
    for seed in range(3):
        attend(*inputs(context, seed), context=context)
    assert len(seen) == 1
    attend(*(x[:, :2] for x in inputs(context, 3)), context=context)
    assert len(seen) == 2, "other shapes are another call"


def test_who_looks_at_weights_or_wants_gradients_is_not_passed_by(monkeypatch):
    context = CONTEXTS["one query, padded"]()
    relative = biases(context, 4)
    q, k, v = inputs(context, 0)
    with torch.no_grad():
        attend(q, k, v, context=context, relative=relative)
        with recorded() as weights:
            attend(q, k, v, context=context, relative=relative)
    assert [tuple(weight.shape) for weight in weights] == [(2, 4, 1, 9)]
    ran = []
    run = tiled.run
    monkeypatch.setattr(tiled, "run", lambda request: ran.append(1) or run(request))
    attend(q.requires_grad_(), k, v, context=context, relative=relative).sum().backward()
    assert ran
    assert q.grad is not None
