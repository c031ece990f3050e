"""`attend`: its arguments, its choice of a backend, SDPA's exactness, and errors that say the way out."""

import logging
import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, zeros

from attention_cases import LargestTensor, assert_same, patterns, random_context, results, tensors
from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.patterns import Causal, Global, Pattern, PerHead, Window
from polyformer.attention.patterns.layout import Keys, Row
from polyformer.attention.patterns.mods import broadcasts
from polyformer.cli.plots.pattern import pictures
from polyformer.core.errors import InputError
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context

TEXTS: list[tuple[str, Pattern]] = [
    ("Window(2) | Global(1)", Window(2) | Global(1)),
    ("PerHead([Causal(), Window(2)])", PerHead(["Causal()", "Window(2)"])),
    ("Window(2) & Causal()", "Causal()" & Window(2)),
]


@pytest.mark.parametrize(("text", "pattern"), TEXTS)
def test_a_text_is_a_pattern(text: str, pattern: Pattern) -> None:
    q, k, v = tensors(1, 2, 2, 9, 9)
    assert torch.equal(attend(q, k, v, pattern=text), attend(q, k, v, pattern=pattern))
    plan = explain(q, k, v, pattern=text)
    assert str(plan) == str(explain(q, k, v, pattern=pattern))
    images = [pictures(each, Context(9, 9), heads=2) for each in (text, pattern)]
    assert [image.summary() for image in images[0]] == [image.summary() for image in images[1]]


@pytest.mark.parametrize(
    ("option", "way_out"),
    [
        ({"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, "mask_mod=lambda b, h, q_idx, kv_idx: mask"),
        ({"is_causal": True}, r'pattern="Causal\(\)"'),
        ({"dropout_p": 0.1}, "use dropout"),
        ({"enable_gqa": True}, "leave it out"),
    ],
)
def test_arguments_of_torch_have_counterparts(option: dict[str, Any], way_out: str) -> None:
    q, k, v = tensors(1, 2, 2, 9, 9)
    with pytest.raises(InputError, match=f"{next(iter(option))}: no argument of attend, .*{way_out}"):
        attend(q, k, v, **option)
    with pytest.raises(TypeError, match=r"attend\(\) got an unexpected keyword argument 'masks'"):
        attend(q, k, v, masks=None)  # type: ignore[call-overload]


def test_definition_is_the_equation() -> None:
    q, k, v = (
        torch.tensor(x, dtype=torch.float64).view(1, 1, -1, 1) for x in ([1.0, 2.0], [3.0, 4.0], [5.0, 7.0])
    )
    out, lse = attend(q, k, v, scale=1.0, backend="definition", return_lse=True)
    weight = torch.tensor([4.0 - 3.0, 8.0 - 6.0], dtype=torch.float64).sigmoid()
    torch.testing.assert_close(out.flatten(), 5 + 2 * weight)
    torch.testing.assert_close(
        lse.flatten(), torch.tensor([[3.0, 4.0], [6.0, 8.0]], dtype=torch.float64).logsumexp(-1)
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(patterns, st.integers(1, 40), st.integers(0, 30), st.booleans(), st.booleans(), st.booleans())
def test_sdpa_agrees_with_the_definition(
    pattern: Pattern, queries: int, past: int, causal: bool, documents: bool, padding: bool
) -> None:
    torch.manual_seed(queries)
    q, k, v = tensors(2, 4, 2, queries, queries + past)
    context = random_context(2, queries, queries + past, causal=causal, documents=documents, padding=padding)
    ours, expected = (
        results(q, k, v, lse=False, pattern=pattern, context=context, backend=name)
        for name in ("sdpa", "definition")
    )
    assert_same(ours, expected)


@pytest.mark.parametrize("queries", [1, 2, 5, 12])
@pytest.mark.parametrize("start", [None, 0, 4])
def test_causal_is_aligned_with_the_slots_in_every_backend(queries: int, start: int | None) -> None:
    q, k, v = tensors(1, 2, 2, queries, 16)
    context = Context(queries, 16, causal=True, q_start=start)
    first = 16 - queries if start is None else start
    seen = torch.arange(16) <= torch.arange(first, first + queries).unsqueeze(1)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    for backend in ("sdpa", "tiled", "definition"):
        torch.testing.assert_close(attend(q, k, v, context=context, backend=backend), expected)


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "definition"])
def test_rows_that_see_nothing_are_zero_in_every_backend(backend: str) -> None:
    q, k, v = tensors(2, 2, 1, 5, 5)
    context = Context(5, 5, kv_valid=torch.tensor([[False] * 5, [True] * 5]))
    out = attend(q, k, v, context=context, backend=backend)
    out.sum().backward()
    assert not out[0].any()
    assert out[1].all()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert not x.grad[0].any()


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("backend", ["auto", "tiled", "definition"])
def test_no_queries_or_no_keys(queries: int, keys: int, backend: str) -> None:
    q, k, v = tensors(2, 2, 1, queries, keys)
    doc = torch.zeros(2, 5, dtype=torch.long)
    context = Context(queries, keys, q_start=0, causal=True, q_doc=doc[:, :queries], kv_doc=doc[:, :keys])
    out, lse = attend(q, k, v, context=context, backend=backend, return_lse=True)
    assert out.shape == (2, 2, queries, 5)
    assert lse.shape == (2, 2, queries)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out.sum().backward()
    assert q.grad is not None
    assert not q.grad.any()


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "definition"])
def test_a_bare_mask_mod_is_a_pattern(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = tensors(1, 2, 2, 30, 30)
    mask_mod = lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx >= q_idx - 4 - h)  # noqa: E731
    expected = attend(q, k, v, pattern=mask_mod, backend="definition")
    torch.testing.assert_close(attend(q, k, v, mask_mod=mask_mod, backend=backend), expected)
    both = attend(q, k, v, pattern=Global(1), mask_mod=mask_mod, backend=backend)
    torch.testing.assert_close(both, attend(q, k, v, pattern=Global(1) & mask_mod, backend="definition"))


def test_a_layout_says_where_a_mask_mod_needs_to_look() -> None:
    torch.manual_seed(0)
    q, k, v = tensors(1, 1, 1, 900, 900)
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= 3  # noqa: E731
    function = lambda start, stop: Keys(((start - 3, stop + 3),), ((stop - 4, start + 4),))  # noqa: E731
    rows = tuple(Row(i, i + 50, function(i, i + 50)) for i in range(0, 900, 50))
    expected = attend(q, k, v, pattern=Window(3), backend="definition")
    for layout in (function, rows):
        with LargestTensor() as seen:
            out = attend(q, k, v, mask_mod=mask_mod, layout=layout, backend="tiled")
        torch.testing.assert_close(out, expected)
        assert seen.largest <= 256 * (256 + 6)


def test_a_layout_without_a_mask_mod_is_refused() -> None:
    with pytest.raises(
        InputError, match="layout: it says which keys a mask_mod needs, and no mask_mod was given"
    ):
        attend(*tensors(1, 1, 1, 4, 4), pattern=Window(2), layout=lambda start, stop: Keys(((0, 4),)))


def bad(**changes: Any) -> dict[str, Any]:
    """Valid arguments with some replaced."""
    return {"q": zeros(2, 4, 5, 8), "k": zeros(2, 2, 6, 8), "v": zeros(2, 2, 6, 8), **changes}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (bad(q=zeros(4, 5, 8)), r"q: expected 4 axes \[batch, heads, length, width\], got \(4, 5, 8\)"),
        (bad(q="q"), r"q: expected a tensor \[batch, heads, length, width\], got 'q'"),
        (bad(k=None), r"k: expected a tensor .*, got None"),
        (bad(q=zeros(2, 4, 5, 8).to_sparse()), "q: expected a dense tensor, got .* layout torch.sparse_coo"),
        (bad(v=zeros(2, 2, 6, 8).to_mkldnn()), "v: expected a dense tensor, got .* layout torch._mkldnn"),
        (bad(q=zeros(2, 4, 5, 8).half()), "q, k, v: expected one dtype, got torch.float16, torch.float32"),
        (
            bad(**{name: zeros(2, 2, 6, 8).int() for name in "qkv"}),
            "expected a floating dtype, got torch.int32",
        ),
        (bad(v=zeros(2, 2, 6, 8, device="meta")), "expected one device, got cpu, cpu, meta"),
        (bad(v=zeros(2, 2, 7, 8)), r"k, v: expected the same batch, heads and length, got \(2, 2, 6, 8\)"),
        (bad(q=zeros(2, 4, 5, 9)), "q, k: expected the same batch and width"),
        (bad(q=zeros(2, 3, 5, 8)), "k: expected a number of heads that divides 3, got 2"),
        (bad(dropout=1.0), r"dropout: expected a probability in \[0, 1\), got 1.0"),
        (bad(context=Context(5, 5)), "context: made for 5 queries and 5 keys, got 5 and 6"),
        (bad(pattern=""), "pattern: expected an expression like"),
        (bad(backend="tile"), "unknown backend 'tile': did you mean 'tiled'?"),
        (
            bad(backend="flex", q=zeros(2, 4, 5, 8).requires_grad_()),
            "'flex' cannot take this call: it has no backward on a CPU",
        ),
        (bad(backend="sdpa", return_lse=True), "'sdpa' cannot take this call: torch's function does not"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attend(**arguments)


@pytest.mark.parametrize("backend", ["definition", "tiled"])
@pytest.mark.parametrize("size", [256.0, 3e4])
def test_weights_of_large_scores_sum_to_one(size: float, backend: str) -> None:
    """Forward and in gradients, where float32 has steps of 1 or of 2^20 for these scores."""
    x = torch.full((1, 2, 23, 80), size)
    v = torch.full_like(x, size, requires_grad=True)
    out = attend(x, x, v, backend=backend)
    torch.testing.assert_close(out, v.detach(), rtol=1e-5, atol=0)
    out.sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, torch.ones_like(v), rtol=1e-5, atol=0)


def test_gradients_of_large_scores_are_those_of_small_scores() -> None:
    """The first channel adds 2^26 to all scores, where float32 has steps of 8."""
    torch.manual_seed(0)
    channels = torch.tensor([1.0] * 9)[None, None, :, None], -8.0 * torch.randint(0, 2, (1, 1, 30, 1))
    v, results = torch.randn(1, 1, 30, 3), []
    for size in (0.0, 2.0**13):
        leaves = [*(torch.cat([torch.full_like(x, size), x], -1) for x in channels), v]
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = attend(*leaves, scale=1.0, backend="definition")
        results.append([out, *(x[..., 1:] for x in torch.autograd.grad(out.sin().sum(), leaves))])
    for small, large in zip(*results):
        torch.testing.assert_close(large, small, rtol=1e-4, atol=1e-5)


def test_dropout_drops_in_every_backend() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 8, 4) for _ in range(3))
    for backend in ("sdpa", "tiled", "definition"):
        assert not torch.allclose(
            attend(q, k, v, dropout=0.5, backend=backend), attend(q, k, v, backend=backend)
        )


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "definition"])
def test_autocast_computes_in_its_own_type(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend(q, k, v.bfloat16(), pattern=Causal(), backend=backend)
        exact = attend(*(x.double() for x in (q, k, v)), pattern=Causal(), backend=backend)
    assert mixed.dtype == torch.bfloat16
    assert exact.dtype == torch.float64
    torch.testing.assert_close(mixed.double(), exact, rtol=0.02, atol=0.02)
    mixed.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "definition"])
def test_inference_mode(backend: str) -> None:
    q, k, v = tensors(2, 4, 2, 300, 300)
    with torch.inference_mode():
        out = attend(q, k, v, pattern=Window(9), backend=backend)
    torch.testing.assert_close(out, attend(q, k, v, pattern=Window(9), backend="definition"))


def test_recording_shows_the_weights_and_needs_no_other_backend() -> None:
    q, k, v = tensors(1, 2, 2, 6, 6)
    with recorded() as weights:
        out = attend(q, k, v, pattern=Causal(), backend="tiled")
        attend(q, k, v)
    assert [x.shape for x in weights] == [(1, 2, 6, 6)] * 2
    torch.testing.assert_close(weights[0] @ v, out)
    assert torch.equal(weights[0], weights[0].tril())


@pytest.mark.parametrize("pattern", [None, Causal(), Window(3)], ids=str)
def test_sdpa_compiles_into_one_graph(pattern: Pattern | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
    compiled = torch.compile(
        lambda q, k, v: attend(q, k, v, pattern=pattern), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v, pattern=pattern))


def test_tiled_breaks_the_graph_and_says_why() -> None:
    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))

    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, pattern=Window(3), backend="tiled")

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, pattern=Window(3), backend="tiled")

    torch.testing.assert_close(torch.compile(broken, backend="eager")(q, k, v), broken(q, k, v))
    with pytest.raises(Exception, match="tiled walks a layout in Python"):
        torch.compile(whole, fullgraph=True, backend="eager")(q, k, v)


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="polyformer.attention.functional.attend"):
        attend(*tensors(1, 1, 1, 4, 4), return_lse=True)
    assert "attend: tiled (not sdpa: torch's function does not return the log-sum-exp" in caplog.text


def test_a_table_that_is_read_in_some_calls_only_is_refused_by_tiled() -> None:
    table = torch.randn(40, requires_grad=True)
    q, k, v = (torch.randn(1, 1, 40, 8) for _ in range(3))

    @broadcasts
    def by_value(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[(i - j).abs()] if i.max() > 5 else s

    def by_mode(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[(i - j).abs()] if torch.is_grad_enabled() else s

    for score_mod in (by_value, by_mode):
        with pytest.raises(InputError, match="score_mod: it reads a tensor that requires a gradient in some"):
            attend(q, k, v, score_mod=score_mod, backend="tiled")
        assert attend(q, k, v, score_mod=score_mod, backend="definition").requires_grad


def test_a_plain_call_reaches_the_kernel_through_six_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch.nn.functional.scaled_dot_product_attention
    names: list[str] = []

    def record(*arguments: Any, **options: Any) -> Tensor:
        stack = [frame.name for frame in traceback.extract_stack()]
        names.extend(stack[stack.index("attend") : -1])
        return kernel(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    q = torch.randn(1, 2, 8, 4)
    attend(q, q, q, pattern=Causal())
    assert names[0] == "attend"
    assert len(names) <= 6, names
