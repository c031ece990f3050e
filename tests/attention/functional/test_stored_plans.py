"""Stored plans: a repeated call is planned once, and each call computes what the definition says."""

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from pairwise import pairwise
from polyformer.attention.functional import plan
from polyformer.attention.functional.attend import attend, explain, plan_key
from polyformer.attention.functional.backends import sdpa
from polyformer.attention.functional.backends.tiled import run as tiled
from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import Call, prepare
from polyformer.attention.patterns import Global, Window
from polyformer.attention.patterns.base import Pattern
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context

stored = sys.modules[attend.__module__]

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


def squares(seed: int = 0, length: int = 9) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, length, 6, dtype=torch.float64, generator=generator) for _ in range(3)]


def defined(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    return attend(*inputs, **options, backend="definition")


PLACES = torch.arange(20)
RULES: dict[str, Any] = {
    "text": "Window(3)",
    "object": Window(3, 1) | Global(1),
    "mod": lambda b, h, i, j: (i - j) % 3 != 1,
    "table": lambda b, h, i, j: PLACES[i] >= PLACES[j],
}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls that are planned, from an empty store on."""
    counted: list[int] = []
    choose = plan.choose
    monkeypatch.setattr(plan, "choose", lambda request: counted.append(1) or choose(request))
    monkeypatch.setattr(stored, "_plans", {})
    return counted


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("of_context", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_equal_calls_are_planned_once(planned: list[int], rule: str, of_context: bool, gradients: bool):
    for seed in range(3):
        q, k, v = (x.requires_grad_(gradients) for x in squares(seed))
        context = Context(9, 9, causal=True) if of_context else None
        got = attend(q, k, v, pattern=RULES[rule], context=context)
        before = len(planned)
        expected = defined(q, k, v, pattern=RULES[rule], context=context)
        del planned[before:]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        if gradients:
            weight = torch.randn_like(got)
            for x, y in zip(*(torch.autograd.grad(out, (q, k, v), weight) for out in (got, expected))):
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    assert len(planned) == (3 if rule == "table" else 1), "a table may change between calls"


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_plans_of_every_backend_are_stored(planned: list[int], backend: str):
    for seed in range(2):
        inputs = squares(seed)
        got = attend(*inputs, pattern="Window(3)", backend=backend, return_lse=True)
        expected = defined(*inputs, pattern="Window(3)", return_lse=True)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert len(planned) == 2, "this call and its definition"


def test_a_number_that_a_mod_reads_may_change(planned: list[int]):
    inputs, least = squares(), 0
    rule = lambda b, h, i, j: i - j >= least  # noqa: E731
    first = attend(*inputs, pattern=rule)
    least = -2
    second = attend(*inputs, pattern=rule)
    torch.testing.assert_close(second, defined(*inputs, pattern=rule), rtol=1e-10, atol=1e-10)
    assert not torch.equal(first, second)


@dataclasses.dataclass(frozen=True, eq=False)
class _Table(Pattern):
    """A pattern whose rule is in a tensor, which its owner may change."""

    allowed: torch.Tensor

    def allows(self, context: Context, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return self.allowed[q_idx, kv_idx]


@dataclasses.dataclass(frozen=True)
class _Asked(Pattern):
    """A pattern whose rule asks a function, which may read anything."""

    function: Any

    def allows(self, context: Context, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return q_idx - kv_idx >= self.function()


def test_a_pattern_with_a_function_is_not_shared():
    inputs, least = squares(), [0]
    pattern = _Asked(lambda: least[0])
    before = attend(*inputs, pattern=pattern)
    least[0] = -2
    assert not torch.equal(before, attend(*inputs, pattern=pattern))


def test_a_pattern_with_a_tensor_is_not_shared():
    inputs, pattern = squares(), _Table(torch.ones(9, 9, dtype=torch.bool))
    before = attend(*inputs, pattern=pattern)
    pattern.allowed.tril_()
    after = attend(*inputs, pattern=pattern)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, attend(*inputs, pattern="Causal()"), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", [math.nan, math.inf])
def test_a_stored_plan_isolates_what_is_not_finite(kind: float, gradients: bool):
    clean = attend(*squares(), pattern="Causal()")
    q, k, v = squares()
    v[0, :, 5], k[1, 2, 7] = kind, kind
    got = attend(*(x.requires_grad_(gradients) for x in (q, k, v)), pattern="Causal()")
    assert torch.equal(got[0, :, :5], clean[0, :, :5])
    assert torch.equal(got[1, 2, :7], clean[1, 2, :7])
    assert got[0, :, 5:].isnan().all()
    if gradients:
        got[0, :, :5].sum().backward()
        assert q.grad is not None
        assert q.grad.isfinite().all()


def test_plans_of_inference_mode_do_not_reach_training():
    with torch.inference_mode():
        expected = attend(*squares(), pattern="Window(4)")
    q, k, v = (x.requires_grad_() for x in squares())
    out = attend(q, k, v, pattern="Window(4)")
    out.sum().backward()
    assert torch.equal(out.detach(), expected)


def test_autocast_casts_repeated_calls_too():
    inputs = [x.float() for x in squares()]
    halves = [x.bfloat16() for x in inputs]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            got = attend(*inputs, pattern="Causal()")
        assert torch.equal(got, attend(*halves, pattern="Causal()"))


def test_the_store_is_bounded(planned: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stored, "STORED", 3)
    for length in range(6, 16):
        attend(*squares(length=length), pattern="Window(4)")
    assert len(stored._plans) == 3
    before, latest = len(planned), list(stored._plans)
    attend(*squares(length=15), pattern="Window(4)")
    assert len(planned) == before
    monkeypatch.setattr(stored, "SMALL", 100)
    attend(*squares(length=30), pattern="Window(4)")
    assert list(stored._plans) == latest
    assert len(planned) == before + 1


@pytest.mark.parametrize(("stated", "queries"), [(None, 9), (None, 1), ("Full()", 9), ("Causal()", 9)])
def test_a_call_without_a_mask_is_neither_planned_nor_stored(
    planned: list[int], stated: str | None, queries: int
):
    q, k, v = squares()
    context = None if stated is not None else Context(queries, 9, causal=True)
    got = attend(q[:, :, -queries:], k, v, pattern=stated, context=context)
    assert not planned
    assert not stored._plans
    expected = defined(q[:, :, -queries:], k, v, pattern=stated, context=context)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_a_call_that_a_tracer_or_a_transform_looks_into_has_no_key():
    q, k, v = squares()
    keys = [plan_key(Call(q, k, v))]

    def call(q: torch.Tensor) -> torch.Tensor:
        keys.append(plan_key(Call(q, k, v)))
        return q.sum()

    torch.func.grad(call)(q)
    torch.jit.trace(call, (q,), check_trace=False)
    with forward_ad.dual_level():
        call(q)
    assert keys[0] is not None
    assert keys[1:] == [None] * 3


def test_a_request_counts_the_scores_of_all_rows_and_heads():
    q, k = torch.zeros(2, 6, 5, 4), torch.zeros(2, 3, 7, 4)
    assert prepare(Call(q, k, k)).pairs == 2 * 6 * 5 * 7


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
