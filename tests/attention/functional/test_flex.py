"""The BlockMask made from a layout; the compiled kernels against the definition, on a CPU and on CUDA."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from attention_cases import LargestTensor, dense, patterns, random_context
from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.functional.backends import flex
from polyformer.attention.functional.backends.flex import BLOCK
from polyformer.attention.functional.request import Call, prepare
from polyformer.attention.patterns import BlockWindow, Causal, Documents, Global, Pattern, PerHead, Window
from polyformer.attention.patterns.implied import Full, implied
from polyformer.core.sequence.context import Context

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="compiled FlexAttention needs a CUDA device"
)


def block_mask(
    pattern: Pattern, context: Context, batch: int = 1, heads: int = 1, device: torch.device = CPU
) -> Any:
    """The BlockMask of a call of this pattern."""
    shapes = (batch, heads, context.q_len, 16), (batch, heads, context.kv_len, 16)
    q, k = (torch.empty(1, device=device).expand(shape) for shape in shapes)
    return flex.block_mask(dataclasses.replace(prepare(Call(q, k, k, context=context)), pattern=pattern))


def blocks_of(counts: Tensor, indices: Tensor) -> Tensor:
    """Which blocks a pair of BlockMask tables names, [B, H, rows, columns]."""
    order = torch.arange(indices.shape[-1]) < counts.unsqueeze(-1)
    return torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), order)


def per_block(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Whether any and whether every pair of each 128 x 128 block is allowed, [B, H, rows, columns]."""
    queries, keys = mask.shape[-2:]
    shape = *mask.shape[:2], -(-queries // BLOCK), -(-keys // BLOCK)
    some, every = torch.zeros(shape).bool(), torch.zeros(shape).bool()
    for i in range(shape[2]):
        for j in range(shape[3]):
            block = mask[:, :, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            some[:, :, i, j] = block.any(-1).any(-1)
            every[:, :, i, j] = block.all(-1).all(-1) & ((j + 1) * BLOCK <= keys)
    return some, every


@settings(max_examples=40, deadline=None, derandomize=True)
@given(patterns, st.integers(1, 400), st.integers(0, 300), st.booleans(), st.booleans())
def test_the_block_mask_covers_the_mask(
    pattern: Pattern, queries: int, past: int, documents: bool, padding: bool
) -> None:
    torch.manual_seed(queries)
    context = random_context(2, queries, queries + past, documents=documents, padding=padding)
    needed, every = per_block(dense(pattern, context, 2, 2))
    blocks = block_mask(pattern, context, 2, 2)
    some = blocks_of(blocks.kv_num_blocks, blocks.kv_indices)
    full = blocks_of(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert torch.equal((some | full).expand_as(needed), needed), "exact, for each batch row and head"
    assert torch.equal(full.expand_as(every), every)
    assert not (some & full).any()
    assert blocks.seq_lengths == (queries, queries + past)
    some, full = flex.blocks_by_layout(pattern, context, CPU)
    assert (needed <= some).all(), "a block is missed"
    assert (full <= every).all(), "full is not full"


def test_all_layers_and_steps_share_a_block_mask() -> None:
    first, second = (block_mask(Window(256), Context(512, 512)) for _ in range(2))
    assert first is second, "it depends on lengths only"
    context = random_context(2, 140, 140, documents=True)
    assert block_mask(Window(3), context, 2) is block_mask(Window(3), context, 2)
    assert block_mask(Window(3), context, 2) is not block_mask(Window(4), context, 2)
    with torch.inference_mode():
        assert not block_mask(Window(255), Context(512, 512)).kv_indices.is_inference()


def test_rows_and_heads_have_their_own_blocks() -> None:
    doc = torch.tensor([[0] * 128 + [1] * 256, [0] * 256 + [1] * 128])
    documents = Context(384, 384, q_doc=doc, kv_doc=doc)
    blocks = block_mask(Documents(), documents, 2, 3)
    assert blocks.full_kv_num_blocks.tolist() == [[[1, 2, 2]], [[2, 2, 1]]]
    assert blocks.kv_num_blocks.sum() == 0
    heads = block_mask(PerHead([BlockWindow(128, 0, 0), Full()]), Context(384, 384), 2, 3)
    assert heads.full_kv_num_blocks.tolist() == [[[1] * 3, [3] * 3, [1] * 3]]


def test_full_blocks_are_where_the_layout_has_them() -> None:
    some, full = flex.blocks_by_layout(Window(256), Context(1024, 1024), CPU)
    assert full.sum(-1).flatten().tolist() == [2, 3, 3, 3, 3, 3, 3, 2]
    assert (some & ~full).sum(-1).flatten().tolist() == [1, 1, 2, 2, 2, 2, 1, 1]
    some, full = flex.blocks_by_layout(Full(), Context(1024, 1024), CPU)
    assert some.all()
    assert full.all()


def test_no_more_pairs_are_evaluated_than_the_limit() -> None:
    length = 16384
    with LargestTensor() as seen:
        block_mask(Causal() & Window(300) | Global(2), Context(length, length))
    assert seen.largest <= 2 * (length // BLOCK) * (length // BLOCK + 1)
    with LargestTensor() as seen:
        block_mask(Window(300), Context(8192, 8192))
    assert seen.largest <= 2 * flex.TOGETHER


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("pattern", [Causal(), Window(40) | Global(2), Window(30, 0, 3), None], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (130, 270)])
def test_flex_attention_agrees_when_run_as_it_is_written(
    pattern: Pattern | None, queries: int, keys: int
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)
    context = random_context(2, queries, keys, documents=True, padding=True)
    limits = implied(context) if pattern is None else pattern & implied(context)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    score_mod = lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()  # noqa: E731
    blocks = block_mask(limits, context, 2, 4)
    among_keys = lambda score, b, h, i, j: score_mod(score, b, h, i + context.offset, j)  # noqa: E731
    out = flex_attention(q, k, v, score_mod=among_keys, block_mask=blocks, enable_gqa=True)
    expected = attend(q, k, v, pattern=pattern, context=context, score_mod=score_mod, backend="definition")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_compiles_into_the_graph_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "is_autocast_available", None)  # torch 2.11 cannot trace it
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 140, 16), torch.randn(2, 2, 200, 16), torch.randn(2, 2, 200, 16)
    context = random_context(2, 140, 200, causal=True, documents=True, padding=True)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex.run(prepare(Call(q, k, v, pattern=Window(40) | Global(2), context=context)))[0]

    expected = attend(q, k, v, pattern=Window(40) | Global(2), context=context, backend="definition")
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), expected, rtol=1e-4, atol=1e-5)


class Elsewhere:
    """A request that says it lies on CUDA: what is refused there can be asked anywhere."""

    def __init__(
        self,
        heads: int = 2,
        width: int = 16,
        v_width: int = 16,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
        length: int = 8,
    ) -> None:
        self.q = Fake((1, heads, length, width), dtype)
        self.v = Fake((1, 2, length, v_width), dtype)
        self.relative = None
        self.groups, self.dropout, self.context = heads // 2, dropout, Context(length, length)


class Fake:
    """A tensor's shape, dtype and device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cuda")


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Elsewhere(), None),
        (Elsewhere(dropout=0.1), "FlexAttention has no dropout"),
        (Elsewhere(dtype=torch.float64), "its kernels have no float64"),
        (Elsewhere(v_width=8), "its kernels need widths of 16 or more, got 8"),
        (Elsewhere(heads=6), None),
        (Elsewhere(length=0), "there is nothing to attend to"),
    ],
)
def test_what_it_refuses_on_cuda(request_: Any, reason: str | None) -> None:
    assert flex.refuses(request_) == reason


needs_compiler = pytest.mark.skipif(
    flex._lacks() is not None, reason="FlexAttention on a CPU needs AVX2 and a C++ compiler"
)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@torch.no_grad()
@pytest.mark.parametrize(
    ("pattern", "heads", "width", "queries", "keys"),
    [(Window(40) | Global(2), 6, 20, 131, 270), (None, 2, 16, 1, 70)],
    ids=str,
)
def test_the_kernel_for_a_cpu_agrees(
    pattern: Pattern | None, heads: int, width: int, queries: int, keys: int
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, heads, queries, width)
    k, v = torch.randn(2, 2, keys, width), torch.randn(2, 2, keys, 12)
    context = random_context(2, queries, keys, causal=True, documents=True, padding=True)
    slopes = torch.rand(heads)
    options: dict[str, Any] = {"pattern": pattern, "context": context, "scale": 0.3}
    if queries > 1:
        options["score_mod"] = lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()
    assert explain(q, k, v, **options, backend="flex").backend == "flex"
    out = attend(q, k, v, **options, backend="flex")
    torch.testing.assert_close(out, attend(q, k, v, **options, backend="definition"), rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@torch.no_grad()
def test_lengths_and_windows_may_change_on_a_cpu() -> None:
    q, k, v = torch.randn(3, 1, 2, 260, 16, dtype=torch.bfloat16).unbind()
    for n, width in ((260, 9), (200, 17)):
        inputs = q[:, :, -n:], k, v
        out = attend(*inputs, pattern=Window(width), backend="flex")
        expected = attend(*(x.double() for x in inputs), pattern=Window(width), backend="definition")
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_what_it_refuses_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    request = prepare(Call(*torch.randn(3, 1, 2, 8, 4).unbind(), score_mod=lambda score, b, h, i, j: score))
    assert flex.refuses(request) == "it has no backward on a CPU; call it under torch.no_grad()"
    with torch.no_grad():
        wanted = dataclasses.replace(request, return_lse=True)
        assert flex.refuses(wanted) == "its kernel for a CPU returns no log-sum-exp"
        assert (
            explain(request.q, request.k, request.v, pattern=Window(1), return_lse=True)
            .reasons["flex"]
            .startswith("on a CPU it compiles anew")
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc
    from torch._inductor.kernel.flex import flex_cpu

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(flex_cpu, "check_cpu_supported", lambda: True)
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    flex._lacks.cache_clear()
    assert str(flex._lacks()).startswith("there is no C++ compiler")
    monkeypatch.setattr(flex_cpu, "check_cpu_supported", lambda: False)
    flex._lacks.cache_clear()
    assert str(flex._lacks()).startswith("its kernel for a CPU needs AVX2")
    flex._lacks.cache_clear()


def _inputs(dtype: torch.dtype, queries: int, keys: int) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v and a bias table on CUDA, and the same in float64 on the CPU."""
    torch.manual_seed(0)
    shapes = (2, 4, queries, 32), (2, 2, keys, 32), (2, 2, keys, 32), (2 * keys, 4)
    ours = [torch.randn(shape).to("cuda", dtype).requires_grad_() for shape in shapes]
    return ours, [x.detach().cpu().double().requires_grad_() for x in ours]


def _run(inputs: list[Tensor], pattern: Pattern | None, context: Context, backend: str) -> list[Tensor]:
    """Output, log-sum-exp and gradients."""
    q, k, v, table = inputs
    keys = k.shape[2]
    score_mod = lambda score, b, h, i, j: score + table[i - j + keys - 1, h]  # noqa: E731
    out, lse = attend(
        q, k, v, pattern=pattern, context=context, score_mod=score_mod, backend=backend, return_lse=True
    )
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return [out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), inputs)]


def _to_cuda(context: Context) -> Context:
    moved = {name: getattr(context, name) for name in ("q_doc", "kv_doc", "kv_valid")}
    moved = {name: None if x is None else x.cuda() for name, x in moved.items()}
    return Context(context.q_len, context.kv_len, causal=context.causal, **moved)


@needs_cuda
@pytest.mark.parametrize("backend", ["flex", "tiled"])
@pytest.mark.parametrize("pattern", [None, Causal(), Window(40) | Global(2), Window(30, 0, 3)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (130, 270)])
def test_cuda_agrees_with_the_definition(
    backend: str, pattern: Pattern | None, queries: int, keys: int
) -> None:
    torch.manual_seed(0)
    context = random_context(2, queries, keys, documents=True, padding=True)
    ours, exact = _inputs(torch.float32, queries, keys)
    for gradient, other in zip(
        _run(ours, pattern, _to_cuda(context), backend), _run(exact, pattern, context, "definition")
    ):
        torch.testing.assert_close(gradient.cpu().double(), other, rtol=1e-3, atol=1e-3)


@needs_cuda
def test_half_precision_on_cuda_errs_no_more_than_dense_attention() -> None:
    torch.manual_seed(0)
    context = Context(256, 256, causal=True)
    ours, exact = _inputs(torch.bfloat16, 256, 256)
    out = attend(*ours[:3], pattern=Window(64), context=context, backend="flex")
    dense_out = attend(*ours[:3], pattern=Window(64), context=context, backend="sdpa")
    true = attend(*exact[:3], pattern=Window(64), context=context, backend="definition")
    error = lambda x: (x.cpu().double() - true).abs().max()  # noqa: E731
    assert error(out) <= 2 * error(dense_out)


@needs_cuda
def test_rows_that_see_nothing_are_zero_on_cuda() -> None:
    ours, _ = _inputs(torch.float32, 64, 64)
    valid = torch.tensor([[False] * 64, [True] * 64]).cuda()
    out = attend(*ours[:3], context=Context(64, 64, kv_valid=valid), backend="flex")
    out.sum().backward()
    assert not out[0].any()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in ours[:3])


@needs_cuda
def test_many_patterns_and_lengths_stay_compiled() -> None:
    q, k, v = (torch.randn(1, 2, 640, 16, device="cuda") for _ in range(3))
    for width in range(1, 13):
        n = 128 + 40 * width
        ours, expected = (
            attend(q[:, :, -n:], k, v, pattern=Window(width), backend=name) for name in ("flex", "definition")
        )
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@needs_cuda
def test_auto_chooses_flex_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "compiled_lengths", set())
    q, k, v = (torch.randn(1, 2, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert explain(q, k, v, pattern=Window(128)).backend == "flex"
    assert explain(q, k, v, pattern=Causal()).backend == "sdpa"
    assert explain(q, k, v, pattern=Window(128), dropout=0.1).backend == "sdpa"
