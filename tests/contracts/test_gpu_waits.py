"""Parts of mechanisms read no value that a GPU would have to compute first; a CPU is treated as a GPU."""

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyformer.attention.mechanisms.lsh.lsh import hash_keys
from polyformer.attention.mechanisms.lsh.sorted_window import bucket_windows
from polyformer.attention.mechanisms.random_directions import RandomDirections
from polyformer.attention.mechanisms.routing import interval_tiles
from polyformer.core.sequence.context import Context

B, H, R, T = 2, 3, 2, 16
aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
DOCUMENTS = torch.zeros(B, T, dtype=torch.long)
VALID = torch.arange(T).expand(B, T) < 12
CONTEXTS = {
    "plain": Context(T, T),
    "documents": Context(T, T, q_doc=DOCUMENTS, kv_doc=DOCUMENTS),
    "padding": Context(T, T, kv_valid=VALID),
}


class Reads(TorchDispatchMode):
    """Count operations that would wait for a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.number = 0
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in READS
        return func(*args, **(kwargs or {}))


def test_reads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with Reads(monkeypatch) as reads:
        int(torch.zeros(2).max())
        torch.zeros(2).nonzero()
    assert reads.number == 2


@pytest.mark.parametrize("name", CONTEXTS)
def test_lsh_sorts_without_waiting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    keys, directions = torch.randn(B, H, T, 4), torch.randn(R * 4, 4)
    expected = bucket_windows(hash_keys(keys, directions, R), 4, CONTEXTS[name])
    with Reads(monkeypatch) as reads:
        windows = bucket_windows(hash_keys(keys, directions, R), 4, CONTEXTS[name])
    assert not reads.number
    assert torch.equal(windows.order, expected.order)
    assert torch.equal(windows.spots, expected.spots)


@pytest.mark.parametrize("name", CONTEXTS)
def test_routing_sorts_without_waiting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = torch.arange(T).expand(B, H, T) % 4
    with Reads(monkeypatch) as reads:
        order, codes = interval_tiles._sort_tokens(clusters, 4, CONTEXTS[name], 0)
    padded = name == "padding"
    assert reads.number == padded  # of the mask's copy on the host
    assert len(order) == len(codes) == B * H * (12 if padded else T)


def test_a_redraw_reads_the_buffer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    directions = RandomDirections(4, 4, redraw_every=2)
    draws, x = [], torch.ones(4, requires_grad=True)
    reads, tolist = [], torch.Tensor.tolist

    def read(tensor: torch.Tensor) -> object:
        reads.append(tensor)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", read)
    for _ in range(4):
        y = (directions(x) @ x).sum()
        directions.watch(y)
        y.backward()
        draws.append(directions(x))
    assert len(reads) == 1
    assert [torch.equal(a, b) for a, b in itertools.pairwise(draws)] == [False, True, False]
    directions.origin[1] += 2  # by a checkpoint, for example
    assert not torch.equal(directions(x), draws[-1])
    assert len(reads) == 2
