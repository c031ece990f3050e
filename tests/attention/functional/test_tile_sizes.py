"""How `tiled` cuts a call, and which of its ways a tile takes: none of it shows in the result."""

from typing import Any

import pytest
import torch

from attention_cases import assert_same, random_context, results, small_tiles, tensors
from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.backends.tiled import run, work_items
from polyformer.attention.functional.backends.tiled.run import TILES
from polyformer.attention.functional.backends.tiled.tiles import Masks, Tile, TileSizes
from polyformer.attention.functional.request import Call, prepare
from polyformer.attention.patterns import Causal, Global, Pattern, Window
from polyformer.core.errors import InputError
from polyformer.core.ops.cpu import threads
from polyformer.core.ops.product_kernels import BATCHED_PRODUCTS, NEVER, BatchedProducts


@pytest.mark.parametrize("factor", [1.0, 1e3], ids=["small scores", "large scores"])
@pytest.mark.parametrize("pattern", [None, Causal(), Global(3) | Window(20)], ids=str)
def test_scores_of_any_size_are_joined_from_several_tiles(pattern: Pattern | None, factor: float) -> None:
    """Small ones without looking for the largest; that would overflow for the others."""
    torch.manual_seed(0)
    q, k, v = tensors(2, 2, 2, 117, 117)
    q = (q.detach() * factor).requires_grad_()
    context = random_context(2, 117, 117, padding=True)
    item = work_items.work_items(prepare(Call(q, k, v)), 0, 1, TileSizes())[0]
    item.look_at(item.by_query(q.detach()), item.by_key(k.detach()))
    assert item.small_scores == (factor == 1)
    with small_tiles(16, 24):
        ours = results(q, k, v, pattern=pattern, context=context, backend="tiled")
    assert_same(ours, results(q, k, v, pattern=pattern, context=context, backend="definition"))


@pytest.mark.parametrize("heads", [1, 4], ids=["a head at a time", "all heads"])
@pytest.mark.parametrize("smallest", [1, NEVER], ids=["onednn", "blas"])
def test_every_library_and_number_of_heads_agrees_in_float32(smallest: int, heads: int) -> None:
    torch.manual_seed(0)
    exact = [x.detach() for x in tensors(1, 4, 2, 133, 133)]
    expected = results(*(x.requires_grad_() for x in exact), pattern=Window(20) | Global(2))
    inputs = [x.detach().float().requires_grad_() for x in exact]
    choice = BatchedProducts(plain=smallest, transposed=smallest)
    with BATCHED_PRODUCTS.using(choice), small_tiles(16, 24, heads):
        ours = results(*inputs, pattern=Window(20) | Global(2), backend="tiled")
    for mine, other in zip(ours, expected):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_head", [False, True])
def test_a_mask_is_kept_for_other_heads_where_it_is_theirs_too(
    by_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    asked: list[Tile] = []
    ask = Masks._ask

    def counted(self: Masks, tile: Tile, *place: Any) -> Any:
        asked.append(tile)
        return ask(self, tile, *place)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx * 7 + (h if by_head else 0)) % 5 <= q_idx % 5

    monkeypatch.setattr(Masks, "_ask", counted)
    q, k, v = torch.randn(3, 1, 3, 40, 64).unbind()
    with small_tiles(16, 24, 1), threads(1):
        out = attend(q, k, v, mask_mod=mask_mod, backend="tiled")
    assert len(asked) == len(set(asked)) * (3 if by_head else 1)
    torch.testing.assert_close(out, attend(q, k, v, mask_mod=mask_mod, backend="definition"))


def test_threads_get_items_of_equal_size() -> None:
    q = torch.zeros(1, 8, 1024, 64)
    sizes = TileSizes(entries=3 * 128 * 640, blocks=(128,), prices=(1.0,))
    items = work_items.work_items(prepare(Call(q, q, q, pattern=Window(256))), 0, 2, sizes)
    assert [item.kv_heads.stop - item.kv_heads.start for item in items] == [2, 2, 2, 2]


def test_keys_read_again_lie_side_by_side_and_others_stay_where_they_are() -> None:
    x = torch.randn(1, 300, 2, 64).transpose(1, 2)
    for queries, copied in ((300, True), (1, False)):
        item = work_items.work_items(
            prepare(Call(x[:, :, -queries:], x, x)), 0, 1, TileSizes(blocks=(64,), prices=(1.0,))
        )[0]
        keys = item.gathered("keys", x)
        assert torch.equal(keys, item.by_key(x))
        assert keys.is_contiguous() == copied == (keys.data_ptr() != x.data_ptr())


def test_tiles_are_measured_with_one_thread_and_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "core_cache", lambda: 512 << 10)
    with threads(2):
        sizes = TILES.measured()
        assert torch.get_num_threads() == 2
    assert sizes.entries * 4 == 512 << 10
    assert min(sizes.prices) > 0
    assert min(sizes.start, sizes.asked) > 0
    assert TileSizes.from_dict(sizes.to_dict()) == sizes


@pytest.mark.parametrize("wrong", [{"prices": (1.0,)}, {"width": 0}, {"start": -1.0}], ids=str)
def test_sizes_that_say_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        TileSizes(**wrong)
