"""`fused_rows` against the definition in inference, and the calls that stay with the tiles."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention_cases import assert_same, random_context, tensors
from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.functional.backends.tiled import fused_rows, run, work_items
from polyformer.attention.functional.request import Request
from polyformer.attention.patterns import Causal, Global, Pattern, Strided, Window
from polyformer.core.sequence.context import Context
from registered import nightly


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Make rows of 8 queries, use two threads, and record whether the fused kernel computed each call."""
    monkeypatch.setattr(fused_rows, "QUERIES", (8, 4))
    monkeypatch.setattr(fused_rows, "LEAST", 8)
    monkeypatch.setattr(fused_rows, "GATHERED", 200)  # several calls for a run of rows
    monkeypatch.setattr(fused_rows, "MASKS", 9)
    own, fused = run._Call.row_runs, list[bool]()

    def observed(call: run._Call, price: float) -> list[fused_rows.RowRun] | None:
        runs = own(call, price)
        fused.append(runs is not None)
        return runs

    monkeypatch.setattr(run._Call, "row_runs", observed)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with run.ROWS.using(fused_rows.RowPrices(own=99, grouped=99)):  # the kernel is much faster
        yield fused
    torch.set_num_threads(before)


def inputs(batch: int, heads: int, kv_heads: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float64 of one width, without gradients."""
    q, k, _ = tensors(batch, heads, kv_heads, queries, keys)
    return q.detach(), k.detach(), torch.randn(k.shape, dtype=torch.float64)


def results(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, context: Context, backend: str
) -> list[Tensor]:
    with torch.no_grad():
        return [*attend(q, k, v, pattern=pattern, context=context, return_lse=True, backend=backend)]


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2)], ids=str)
@pytest.mark.parametrize("queries", [67, 24])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", [Window(5), Window(9) | Global(2), Window(3, 1, 2), Strided(4)], ids=str)
def test_agrees_with_the_definition(
    heads: tuple[int, int], queries: int, causal: bool, pattern: Pattern, small_rows: list[bool]
) -> None:
    torch.manual_seed(0)
    q, k, v = inputs(2, *heads, queries, 67)
    context = Context(queries, 67, causal=causal)
    ours, expected = (results(q, k, v, pattern, context, name) for name in ("tiled", "definition"))
    assert_same(ours, expected)
    # Calls of patterns with steps are split first.
    assert small_rows == [True] or pattern.structure.step > 1 or isinstance(pattern, Strided)


def test_padding_of_a_single_row_may_hide_keys(small_rows: list[bool]) -> None:
    torch.manual_seed(0)
    q, k, v = inputs(1, 2, 2, 40, 50)
    context = Context(40, 50, causal=True, kv_valid=(torch.arange(50) > 3).unsqueeze(0))
    ours, expected = (results(q, k, v, Window(9), context, name) for name in ("tiled", "definition"))
    assert_same(ours, expected)
    assert small_rows == [True]


def test_other_calls_stay_with_the_tiles(small_rows: list[bool]) -> None:
    torch.manual_seed(0)
    q, k, v = inputs(2, 2, 2, 40, 40)
    different_rows = random_context(2, 40, 40, causal=True, padding=True)
    no_key = Context(40, 40, causal=True, kv_valid=(torch.arange(40) > 0).unsqueeze(0))
    for rows, context in ((2, different_rows), (1, no_key)):
        own = q[:rows], k[:rows], v[:rows]
        ours, expected = (results(*own, Window(9), context, name) for name in ("tiled", "definition"))
        assert_same(ours, expected)
    assert small_rows == [False, False]  # rows of a batch differ; the first query sees no key
    attend(q.requires_grad_(), k, v, pattern=Window(9), backend="tiled").sum().backward()
    assert len(small_rows) == 2, "calls with a gradient have the loop's backward pass"


def test_parts_for_threads_cover_every_row_of_each_item_once() -> None:
    q, k, v = inputs(1, 3, 3, 900, 900)
    request = Request(q, k, v, Context(900, 900, True), Causal(), None, None, 1.0)
    sizes = work_items.TileSizes(blocks=(64,), prices=(1.0,), entries=1 << 12)
    items = work_items.work_items(request, 0, 2, sizes)
    assert len(items) % 2, "otherwise nothing is divided"
    parts = work_items.balanced(items, 2)
    assert len(parts) == 2 * len(items)
    for item in items:
        own = [part.rows for part in parts if part.kv_heads == item.kv_heads]
        assert sum(own, ()) == item.rows
    assert work_items.balanced(items, 1) == items


@pytest.mark.parametrize(("groups", "price"), [(1, 0.1), (1, 9.0), (3, 0.1), (3, 9.0)])
def test_the_measured_price_decides(groups: int, price: float, small_rows: list[bool]) -> None:
    torch.manual_seed(0)
    q, k, v = inputs(1, 3, 3 // groups, 64, 64)
    prices = fused_rows.RowPrices(**{"own" if groups == 1 else "grouped": price * run.CLEARLY})
    context = Context(64, 64, causal=True)
    with run.ROWS.using(prices):
        results(q, k, v, Window(9), context, "tiled")
        context = Context(64, 64, causal=True)  # the other one keeps its decision
        plan = str(explain(q, k, v, pattern=Window(9), context=context, backend="tiled"))
    assert small_rows == 2 * [price > 1]
    assert ("fused kernel" in plan) == (price > 1)


@nightly
def test_a_measurement_gives_prices_or_zero() -> None:
    prices = run.ROWS.measured()
    assert 0 <= prices.own < 100
    assert 0 <= prices.grouped < 100


@pytest.mark.parametrize(
    ("readings", "price"),
    [((2.0, 2.2), 2.0), ((50.0, 3.0, 2.9), 2.9), ((0.1, 9.0, 0.2, 5.0), 0.0)],
    ids=["two agree", "after a busy moment", "busy all the time"],
)
def test_a_price_is_what_two_readings_agree_on(readings: tuple[float, ...], price: float) -> None:
    left = list(readings)
    assert run.agreed_price(lambda: left.pop(0)) == price
    assert not left


def test_nothing_is_measured_while_operations_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_rows: list[bool]
) -> None:
    """The first call of a process on a new machine may be one that counts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run.ROWS, "imposed", None)
    monkeypatch.setattr(run.ROWS, "by_threads", {})
    q, k, v = inputs(1, 2, 2, 40, 40)
    with FlopCounterMode(display=False) as counter:
        ours = results(q, k, v, Window(9), Context(40, 40), "tiled")
    assert counter.get_total_flops() > 0
    assert (small_rows, run.ROWS.by_threads) == ([False], {})
    assert_same(ours, results(q, k, v, Window(9), Context(40, 40), "definition"))
