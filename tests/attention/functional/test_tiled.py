"""`tiled` against the definition: outputs and every gradient; its memory, dropout, precision and limits."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_cases import (
    LargestTensor,
    assert_same,
    distance_bias,
    patterns,
    random_context,
    results,
    small_tiles,
    tensors,
)
from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.backends.tiled import tiles, work_items
from polyformer.attention.patterns import Causal, Global, Pattern, Window
from polyformer.attention.patterns.layout import Keys
from polyformer.core.errors import InputError
from polyformer.core.ops import layers as dropout


def assert_agrees(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """tiled = definition, in outputs and gradients."""
    ours, expected = (results(q, k, v, backend=name, **options) for name in ("tiled", "definition"))
    assert_same(ours, expected)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("pattern", [None, Causal(), Window(5) | Global(2), Window(4, 0, 3)], ids=str)
def test_agrees_with_the_definition(heads: tuple[int, int], pattern: Pattern | None) -> None:
    torch.manual_seed(0)
    context = random_context(2, 131, 131, documents=True)
    assert_agrees(*tensors(2, *heads, 131, 131), pattern=pattern, context=context)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(patterns, st.integers(1, 90), st.integers(0, 70), st.booleans(), st.booleans(), st.booleans())
def test_any_composition_agrees(
    pattern: Pattern, queries: int, past: int, causal: bool, documents: bool, padding: bool
) -> None:
    torch.manual_seed(queries)
    keys = queries + past
    context = random_context(2, queries, keys, causal=causal, documents=documents, padding=padding)
    assert_agrees(*tensors(2, 2, 1, queries, keys), pattern=pattern, context=context)


@pytest.mark.parametrize("start", [0, 20, 63])
def test_queries_may_stand_anywhere_among_the_keys(start: int) -> None:
    torch.manual_seed(start)
    context = random_context(2, 37, 100, causal=True, documents=True, padding=True, q_start=start)
    assert_agrees(*tensors(2, 3, 3, 37, 100), pattern=Window(9), context=context)


def test_heads_may_lie_behind_the_length_in_memory() -> None:
    torch.manual_seed(0)
    q, k, v = (
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for x in tensors(2, 4, 2, 70, 70)
    )
    assert not q.is_contiguous()
    assert_agrees(q, k, v, pattern=Window(7))


@pytest.mark.parametrize("pattern", [None, Causal(), Global(3) | Window(20)], ids=str)
def test_wide_rows_are_joined_from_several_tiles(pattern: Pattern | None) -> None:
    torch.manual_seed(0)
    table, score_mod = distance_bias(117, 2)
    context = random_context(2, 117, 117, padding=True)
    with small_tiles(16, 24):
        assert_agrees(
            *tensors(2, 2, 2, 117, 117), tables=[table], pattern=pattern, score_mod=score_mod, context=context
        )


def test_many_intervals_are_picked_by_index() -> None:
    torch.manual_seed(0)
    slots = tuple((i, i + 1) for i in range(0, 200, 3))
    assert len(slots) > tiles.LISTED
    assert_agrees(
        *tensors(1, 2, 2, 200, 200),
        mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 3 == 0,
        layout=lambda start, stop: Keys(slots, slots),
    )


def _by_query(q: Tensor) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """A content-dependent term, [B, H, Tq, distances], as Shaw's or DeBERTa's."""
    table = torch.randn(*q.shape[:3], 11, dtype=q.dtype, requires_grad=True)
    return [table], lambda s, b, h, i, j: s + table[b, h, i, (i - j).clamp(-5, 5) + 5]


def _by_key(q: Tensor) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """The same by key, and multiplied."""
    table = torch.randn(*q.shape[:3], 11, dtype=q.dtype, requires_grad=True)
    return [table], lambda s, b, h, i, j: s * table[b, h, j, (i - j).clamp(-5, 5) + 5]


def _slopes(q: Tensor) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """Slopes computed from a parameter, and a soft cap read without an index."""
    raw = torch.randn(q.shape[1], dtype=q.dtype, requires_grad=True)
    cap = torch.tensor(3.0, dtype=q.dtype, requires_grad=True)
    slopes = raw.exp()
    return [raw, cap], lambda s, b, h, i, j: cap * torch.tanh((s - slopes[h] * (i - j).abs()) / cap)


def _gathered(q: Tensor) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """A table read by a slice, a function and an index that leaves an axis open."""
    table = torch.randn(q.shape[1], 9, dtype=q.dtype, requires_grad=True)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        by_head = torch.index_select(table, 0, h.flatten())[:, (i - j) % 9]
        return s + by_head + table[0, 3:5].sum() + table[h.flatten()].mean() + table[1][(i * j) % 9]

    return [table], score_mod


def _constant(q: Tensor) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """A score that depends on nothing but where it stands."""
    return [], lambda s, b, h, i, j: (i - j).abs().to(s.dtype).neg()


@pytest.mark.parametrize("make", [_by_query, _by_key, _slopes, _gathered])
@pytest.mark.parametrize("pattern", [None, Window(5) | Global(1)], ids=str)
def test_gradients_reach_what_a_score_mod_captures(make: Callable[..., Any], pattern: Pattern | None) -> None:
    torch.manual_seed(0)
    q, k, v = tensors(2, 4, 2, 83, 83)
    tables, score_mod = make(q)
    context = random_context(2, 83, 83, documents=True)
    assert_agrees(q, k, v, tables=tables, pattern=pattern, score_mod=score_mod, context=context)


def test_a_score_mod_may_ignore_the_scores() -> None:
    q, k, v = tensors(1, 2, 2, 20, 20)
    _, score_mod = _constant(q)
    out = attend(q, k, v, score_mod=score_mod, backend="tiled")
    torch.testing.assert_close(out, attend(q, k, v, score_mod=score_mod, backend="definition"))
    grads = torch.autograd.grad(out.sum(), [q, k, v])
    assert not grads[0].any()
    assert not grads[1].any()
    assert grads[2].any()


def test_score_mod_under_no_grad_is_not_probed() -> None:
    q, k, v = tensors(1, 2, 2, 20, 20)
    shapes = []
    with torch.no_grad():
        attend(q, k, v, score_mod=lambda s, b, h, i, j: shapes.append(s.shape) or s, backend="tiled")
    assert shapes == [()], "it is looked through once, on scalars"


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_some_inputs_want_gradients(needs: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (x.detach().requires_grad_(need) for x, need in zip(tensors(1, 2, 2, 33, 33), needs))
    wanted = [x for x in (q, k, v) if x.requires_grad]
    ours, expected = (
        torch.autograd.grad(attend(q, k, v, pattern=Window(3), backend=name).sin().sum(), wanted)
        for name in ("tiled", "definition")
    )
    assert_same(list(ours), list(expected))


def test_rows_that_see_nothing_give_zeros_forward_and_backward() -> None:
    q, k, v = tensors(2, 2, 2, 9, 9)
    nothing = lambda b, h, q_idx, kv_idx: (q_idx > 3) & (kv_idx < 9)  # noqa: E731
    out, lse = attend(q, k, v, mask_mod=nothing, backend="tiled", return_lse=True)
    assert not out[:, :, :4].any()
    assert (lse[:, :, :4] == -torch.inf).all()
    assert lse[:, :, 4:].isfinite().all()
    (out.sum() + lse.exp().sum()).backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert not q.grad[:, :, :4].any()


def test_parts_join_by_log_sum_exp_with_exact_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = tensors(1, 2, 2, 50, 50)
    even = [
        attend(q, k, v, mask_mod=lambda b, h, i, j, r=r: j % 2 == r, backend="tiled", return_lse=True)
        for r in (0, 1)
    ]
    outs, sums = (torch.stack(parts) for parts in zip(*even))
    joined = (outs * sums.softmax(0).unsqueeze(-1)).sum(0)
    ours = torch.autograd.grad(joined.sin().sum(), [q, k, v])
    expected = torch.autograd.grad(attend(q, k, v, backend="definition").sin().sum(), [q, k, v])
    assert_same(list(ours), list(expected))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("pattern", [None, Window(2)], ids=str)
def test_dropout_has_the_gradients_of_what_it_computed(
    pattern: Pattern | None, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:  # a GPU draws the numbers by torch's generator
        monkeypatch.setattr(dropout, "_generator", lambda device, seed: torch.Generator().manual_seed(seed))
    torch.manual_seed(0)

    def function(*inputs: Tensor) -> Tensor:
        torch.manual_seed(7)
        return attend(*inputs, pattern=pattern, dropout=0.4, backend="tiled")

    assert torch.autograd.gradcheck(function, tensors(1, 2, 1, 7, 7))


def test_dropout_is_right_on_average_and_repeats_with_the_seed() -> None:
    torch.manual_seed(0)
    q, k, v = (x.detach() for x in tensors(1, 1, 1, 5, 5))
    many = torch.stack([attend(q, k, v, dropout=0.3, backend="tiled") for _ in range(1000)])
    torch.testing.assert_close(many.mean(0), attend(q, k, v), rtol=0, atol=0.1)
    assert many.std(0).min() > 0.01
    torch.manual_seed(3)
    first = attend(q, k, v, dropout=0.3, backend="tiled")
    torch.manual_seed(3)
    assert torch.equal(attend(q, k, v, dropout=0.3, backend="tiled"), first)


def test_random_state_is_touched_for_dropout_only() -> None:
    q, k, v = tensors(1, 1, 1, 5, 5)
    before = torch.get_rng_state()
    attend(q, k, v, backend="tiled").sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    attend(q, k, v, dropout=0.5, backend="tiled")
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randint(2**62, ())
    assert torch.equal(torch.get_rng_state(), after), "one seed is drawn, nothing more"


@pytest.mark.parametrize("pattern", [None, Causal(), Window(8), Window(8) | Global(2)], ids=str)
def test_no_tensor_grows_faster_than_the_length(pattern: Pattern | None) -> None:
    largest = []
    for length in (128, 256, 512):
        q, k, v = (torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))
        table = torch.randn(1, 2, length, 3, requires_grad=True)
        score_mod = lambda s, b, h, i, j, table=table: s + table[b, h, i, (i - j).clamp(-1, 1) + 1]  # noqa: E731
        with LargestTensor() as seen, small_tiles(32, 64):
            attend(q, k, v, pattern=pattern, score_mod=score_mod, backend="tiled").sum().backward()
        largest.append(seen.largest)
    assert all(big <= 2 * small for small, big in itertools.pairwise(largest)), largest
    assert largest[-1] <= 2 * 4 * (512 + 16), "q, k, v, their gradients or one tile"


def test_captured_tables_get_no_full_size_gradient_per_tile() -> None:
    tables_seen = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            tables_seen.extend(
                x for x in tree_leaves(result) if isinstance(x, Tensor) and x.shape == table.shape
            )
            return result

    q, k, v = (torch.randn(1, 2, 320, 4, requires_grad=True) for _ in range(3))
    table = torch.randn(1, 2, 320, 3, requires_grad=True)
    with Count(), small_tiles(16, 64):
        score_mod = lambda s, b, h, i, j: s + table[b, h, i, (i - j).clamp(-1, 1) + 1]  # noqa: E731
        attend(q, k, v, pattern=Window(8), score_mod=score_mod, backend="tiled").sum().backward()
    assert len({x.data_ptr() for x in tables_seen}) < 8, "there are 20 tiles"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_errs_no_more_than_dense_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 96, 16).to(dtype).requires_grad_() for _ in range(3))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]

    def run(inputs: list[Tensor], backend: str) -> list[Tensor]:
        out = attend(*inputs, context=random_context(1, 96, 96, causal=True), backend=backend)
        return [out, *torch.autograd.grad((out.double() ** 2).sum(), inputs)]

    truth = run(exact, "definition")
    for ours, dense, true in zip(run([q, k, v], "tiled"), run([q, k, v], "sdpa"), truth):
        assert ours.dtype == dtype
        assert (ours.double() - true).abs().max() <= 2 * (dense.double() - true).abs().max()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part on a thread of its own: the same gradients, each time bit for bit."""
    monkeypatch.setattr(work_items, "WORTH_A_THREAD", 0)
    torch.manual_seed(0)
    q, k, v = tensors(2, 6, 3, 40, 40)
    table, score_mod = distance_bias(40, 6)
    options = {"tables": [table], "score_mod": score_mod, "pattern": Window(9), "backend": "tiled"}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first, second = results(q, k, v, **options), results(q, k, v, **options)
        with torch.inference_mode():
            out = attend(q, k, v, score_mod=score_mod, pattern=Window(9), backend="tiled")
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(mine, other) for mine, other in zip(first, second))
    assert torch.equal(out, first[0])
    assert_same(first, results(q, k, v, **{**options, "backend": "definition"}))


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (torch.full((1, 1, 40, 16), 200.0, dtype=torch.float16, requires_grad=True) for _ in range(3))
    out, lse = attend(q, k, v, pattern=Window(4), backend="tiled", return_lse=True)
    torch.testing.assert_close(out, v)
    assert lse.isfinite().all()
    out.float().sum().backward()
    assert v.grad is not None
    assert v.grad.isfinite().all()


def test_inputs_stay_as_they_are() -> None:
    torch.manual_seed(0)
    q, k, v = tensors(1, 2, 1, 20, 20)
    table, score_mod = distance_bias(20, 2)
    copies = [x.detach().clone() for x in (q, k, v, table)]
    results(q, k, v, tables=[table], score_mod=score_mod, pattern=Window(3), backend="tiled")
    assert all(torch.equal(x, copy) for x, copy in zip((q, k, v, table), copies))


def test_a_changed_input_is_noticed_before_backward() -> None:
    q, k, v = tensors(1, 1, 1, 5, 5)
    table, score_mod = distance_bias(5, 1)
    out = attend(q, k, v, score_mod=score_mod, backend="tiled")
    with torch.no_grad():
        table.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    q, k, v = tensors(1, 1, 1, 5, 5)
    with pytest.raises(InputError, match='backend="definition"'):
        torch.autograd.grad(attend(q, k, v, backend="tiled").sin().sum(), q, create_graph=True)
