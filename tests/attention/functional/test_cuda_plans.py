"""What `auto` chooses on CUDA, and the inputs of torch's kernels; fake tensors need no GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.functional.backends import flex, sdpa
from polyformer.attention.functional.backends.tiled import work_items
from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import Call, prepare
from polyformer.attention.patterns import Causal, Global, Window
from polyformer.core.ops.product_kernels import HalfProducts, product_kernel
from polyformer.core.sequence.context import Context


def documents(batch: int, length: int, number: int = 4) -> Context:
    """Equal documents in each row of a causal call."""
    doc = (torch.arange(length) * number // length).expand(batch, length)
    return Context(length, length, causal=True, q_doc=doc, kv_doc=doc)


def padded(batch: int, length: int) -> Context:
    """A call with padding at the ends of the rows."""
    lengths = torch.linspace(length // 2, length, batch).long().unsqueeze(1)
    return Context(length, length, kv_valid=torch.arange(length) < lengths)


def biases(length: int, heads: int, learned: bool) -> Relative:
    table = torch.zeros(heads, 2 * length - 1, device="cuda", requires_grad=learned)
    return Relative(first=1 - length, bias=table)


def chosen(
    batch: int,
    length: int,
    context: Context,
    *,
    queries: int | None = None,
    groups: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    learned: bool = True,
    **options: Any,
) -> str:
    """The backend of a call of 12 heads of width 64, with gradients."""
    with FakeTensorMode():
        q = torch.zeros(batch, 12, queries or length, 64, dtype=dtype, device="cuda", requires_grad=True)
        k, v = (torch.zeros(batch, 12 // groups, length, 64, dtype=dtype, device="cuda") for _ in range(2))
        relative = biases(length, 12, learned) if bias else None
    return explain(q, k, v, context=context, relative=relative, **options).backend


LONGFORMER = Window(256) | Global(1)


@pytest.mark.parametrize(
    ("backend", "batch", "length", "make", "options"),
    [
        ("sdpa", 32, 512, padded, {"dropout": 0.1}),
        ("sdpa", 32, 1024, documents, {"dropout": 0.1}),
        ("sdpa", 8, 512, padded, {"dropout": 0.1, "bias": True}),
        ("sdpa", 1, 4096, padded, {"dropout": 0.1, "pattern": LONGFORMER}),
        ("sdpa", 8, 1024, documents, {"dropout": 0.1, "groups": 3}),
        ("sdpa", 32, 512, padded, {}),
        ("flex", 32, 2048, padded, {}),
        ("flex", 32, 1024, documents, {}),
        ("flex", 32, 1024, documents, {"groups": 3}),
        ("sdpa", 8, 512, padded, {"bias": True}),
        ("flex", 8, 512, padded, {"bias": True, "learned": False}),
        ("flex", 16, 1024, padded, {"bias": True}),
        ("flex", 1, 4096, padded, {"pattern": LONGFORMER}),
        ("sdpa", 32, 1024, lambda batch, length: Context(length, length), {"pattern": Causal()}),
        ("tiled", 32, 1024, documents, {"dtype": torch.float64}),
        ("tiled", 64, 4096, documents, {"dropout": 0.1}),
    ],
)
def test_auto_on_cuda(backend: str, batch: int, length: int, make: Any, options: dict[str, Any]) -> None:
    assert chosen(batch, length, make(batch, length), **options) == backend


def test_residue_classes_are_at_most_the_rows_of_a_kernel() -> None:
    context = Context(4096, 4096, causal=True)
    with FakeTensorMode():
        x = torch.zeros(256, 1, 4096, 64, dtype=torch.bfloat16, device="cuda")
    for dilation, name in ((255, "by residue class"), (256, "flex")):
        assert name in str(explain(x, x, x, context=context, pattern=Window(8, 0, dilation=dilation)))


def test_many_lengths_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {(length, length) for length in range(1000, 1000 + flex.LENGTHS)}
    monkeypatch.setattr(flex, "compiled_lengths", seen)
    assert chosen(32, 1001, documents(32, 1001)) == "flex", "it is compiled"
    assert chosen(32, 999, documents(32, 999)) == "sdpa"
    context = documents(32, 999)
    assert chosen(32, 999, context, return_lse=True) == "tiled"
    seen.pop()
    assert chosen(32, 999, context) == "flex"


def test_terms_of_vectors_are_no_table_of_all_pairs() -> None:
    """Products with the vectors of all distances, [B, H, T, R], are refused where they are large."""
    with FakeTensorMode():
        q, k, v = (torch.zeros(4, 12, 4096, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        vectors = torch.zeros(12, 4096, 64, dtype=torch.bfloat16, device="cuda")
    context = Context(4096, 4096, causal=True)
    for first in (Relative(first=0, position_keys=vectors), Relative(first=0, position_queries=vectors)):
        choice = explain(q, k, v, context=context, relative=first)
        assert choice.backend == "tiled"
        assert "relative terms of vectors would have 805306368 entries" in str(choice)
        small = explain(*(x.narrow(0, 0, 1) for x in (q, k, v)), context=context, relative=first)
        assert small.backend == "flex"


@pytest.mark.parametrize("pattern", [LONGFORMER, Window(64, 0)], ids=str)
def test_a_few_queries_need_no_block_mask(pattern: Any) -> None:
    for queries in (1, 4):
        context = Context(queries, 8192, causal=True)
        assert chosen(64, 8192, context, queries=queries, pattern=pattern) == "sdpa"
        options = {"queries": queries, "pattern": pattern, "return_lse": True}
        assert chosen(8, 8192, context, **options) == "tiled", "each number of keys would be compiled"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_inputs_fit_the_fused_kernels(dtype: torch.dtype, queries: int, masked: bool) -> None:
    """One query head per key head, and widths that are multiples of 8, unless the flash kernel runs."""
    seen: list[tuple[Tensor, ...]] = []

    def record(*inputs: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
        seen.append(inputs)
        return dot(*inputs, attn_mask=attn_mask, **options)

    dot = torch.nn.functional.scaled_dot_product_attention
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
        q = torch.zeros(2, 6, queries, 20, dtype=dtype, device="cuda")
        k, v = (torch.zeros(2, 2, 9, 20, dtype=dtype, device="cuda") for _ in range(2))
        mask = torch.zeros(2, 1, queries, 9, dtype=dtype, device="cuda") if masked else None
        out = sdpa.Plan(mask, None, False, 0.3, True, masked)(q, k, v)
    assert out.shape == (2, 6, queries, 20)
    flash = dtype == torch.bfloat16 and not masked
    assert {x.shape[3] for x in seen[0]} == ({20} if flash else {24})
    heads = [x.shape[1] for x in seen[0]]
    assert heads == ([6, 2, 2] if flash else [2, 2, 2] if queries == 1 else [6, 6, 6])


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_these_inputs_give_the_same_result(queries: int, masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, queries, 20), torch.randn(2, 2, 9, 20), torch.randn(2, 2, 9, 12)
    mask = torch.randn(2, 1, queries, 9) if masked else None
    plan = sdpa.Plan(mask, None, False, 0.3, True, masked)
    dot = torch.nn.functional.scaled_dot_product_attention
    ours = dot(*plan._for_efficient(q, k, v), attn_mask=mask, scale=0.3)[..., :12].reshape(2, 6, queries, 12)
    torch.testing.assert_close(ours, plan(q, k, v))


def test_a_mask_of_numbers_is_the_mask() -> None:
    torch.manual_seed(0)
    context = Context(5, 9, kv_valid=torch.tensor([[True] * 4 + [False] * 5, [False] * 9]))
    q, k = torch.randn(2, 1, 5, 8), torch.randn(2, 1, 9, 8)

    request = prepare(Call(q, k, k, context=context))
    assert request.pattern is not None
    mask, empty = sdpa._mask(request.pattern, request, None)
    numbers, same = sdpa._mask(request.pattern, request, torch.bfloat16)
    assert torch.equal(numbers == 0, mask)
    assert torch.equal(numbers.isneginf(), ~mask)
    assert torch.equal(empty, same)
    assert numbers.stride()[:3] == (80, 80, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_products_of_tiles_on_cuda(dtype: torch.dtype) -> None:
    """Factors have the type of the inputs, sums are float32; fake tensors check that torch has the kernel."""
    exact = torch.promote_types(dtype, torch.float32)
    with FakeTensorMode():
        a, b = (
            torch.zeros(2, 3, 4, dtype=exact, device="cuda"),
            torch.zeros(2, 5, 4, dtype=exact, device="cuda"),
        )
        kernel, out = product_kernel(a, b.mT, dtype), torch.empty(2, 3, 5, dtype=exact, device="cuda")
        assert isinstance(kernel, HalfProducts) == (dtype != exact)
        assert kernel(a, b.mT).dtype == exact
        assert kernel(a, b.mT, out) is out
        assert not kernel.by_onednn(a, b.mT)
    assert not isinstance(product_kernel(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), dtype), HalfProducts)


@pytest.mark.parametrize("score_mod", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_with_products_of_half_precision(
    dtype: torch.dtype, score_mod: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bmm, products = torch.bmm, []

    def half(a: Tensor, b: Tensor, kind: torch.dtype = torch.float64, out: Tensor | None = None) -> Tensor:
        products.append((a.dtype, b.dtype, kind))
        return bmm(a.to(kind), b.to(kind), out=out)

    monkeypatch.setattr(torch, "bmm", half)
    monkeypatch.setattr(work_items, "product_kernel", lambda q, k, stored: HalfProducts(dtype=stored))
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 70, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    mod = (lambda s, b, h, i, j: s - 0.1 * (i - j).abs()) if score_mod else None
    results = []
    for kind, backend in ((dtype, "tiled"), (torch.float64, "definition")):
        x = [tensor.detach().to(kind).requires_grad_() for tensor in inputs]
        out = attend(*x, pattern=Window(9) | Global(2), score_mod=mod, backend=backend)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        results.append([out, *torch.autograd.grad((out.double() * weights).sum(), x)])
    assert {*products} >= {(dtype, dtype, torch.float32)}
    for own, exact in zip(*results):
        assert (own.double() - exact).norm() < 4 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize(
    ("queries", "groups", "is_general"),
    [(100, 2, True), (64, 2, False), (127, 1, False), (33, 4, True), (1, 3, True), (1, 8, False)],
)
def test_few_queries_of_many_heads_use_the_general_kernel(
    queries: int, groups: int, is_general: bool
) -> None:
    """torch's kernel for few queries joins the rows of a key head's queries, rounded up to a power of 2."""
    assert (flex._kernel_options(queries, groups) is not None) == is_general
