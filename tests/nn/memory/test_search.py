"""The searches of a store: each finds what comparing all keys at once finds."""

import pytest
import torch
from torch import Tensor

from pairwise import pairwise
from polyformer.core.errors import InputError
from polyformer.nn.memory import store
from polyformer.nn.memory.store import SEARCHES, search_plain


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TILE_QUERIES", 5), ("TILE_KEYS", 96), ("SMALLEST_GROUP", 2)):
        monkeypatch.setattr(store, name, value)


def drawn(queries: int, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(queries * number)
    return torch.randn(3, queries, 8, dtype=dtype), torch.randn(3, number, 8, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "size", "count", "dtype"),
    pairwise(
        ["tiled", "faiss"],
        [(1, 1), (7, 5), (1, 500), (13, 96), (13, 97), (33, 701)],
        [1, 3, 32],
        [torch.float64, torch.float32, torch.bfloat16],
    ),
)
def test_the_largest_are_those_of_all_products(
    name: str, size: tuple[int, int], count: int, dtype: torch.dtype
):
    if name == "faiss":
        pytest.importorskip("faiss")
    queries, number = size
    q, keys = drawn(queries, number, dtype)
    scores, places = SEARCHES[name](q, keys, count)
    expected, wanted = search_plain(q, keys, count)
    exact = name == "tiled" and dtype == torch.float64
    torch.testing.assert_close(scores, expected, rtol=1e-12 if exact else 1e-5, atol=1e-12 if exact else 1e-5)
    assert torch.equal(places, wanted)
    assert scores.shape == (3, queries, min(count, number))


def test_equal_products_are_each_found_once():
    q, keys = torch.ones(1, 9, 8), torch.ones(1, 300, 8)
    _, places = SEARCHES["tiled"](q, keys, 20)
    assert all(len(set(row)) == 20 for row in places[0].tolist())


def test_a_tile_is_the_most_that_is_computed_at_once(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    largest = store._topk
    monkeypatch.setattr(store, "_topk", lambda x, count: sizes.append(x.numel()) or largest(x, count))
    SEARCHES["tiled"](*drawn(13, 701, torch.float32), 3)
    assert max(sizes) == 5 * 96
    assert sum(sizes) == 3 * 13 * 701


def test_without_faiss_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(InputError, match=r"pip install 'polyformer\[datastore\]', or take"):
        SEARCHES["faiss"](*drawn(2, 9, torch.float32), 3)
