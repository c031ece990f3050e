"""States: trees of tensors that are mapped, reordered and detached as one."""

import dataclasses

import pytest
import torch
from torch import Tensor

from polyformer import create_model
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True)
class Leaf(State):
    tensor: Tensor
    number: int = 3


@dataclasses.dataclass(frozen=True)
class Tree(State):
    leaves: tuple[Leaf | None, ...]
    own: Tensor | None = None


def tree() -> Tree:
    return Tree((Leaf(torch.arange(3.0, requires_grad=True)), None), torch.tensor([[1], [2], [3]]))


def test_mapping_reaches_every_tensor_and_nothing_else():
    mapped = tree().map(lambda tensor: tensor * 2)
    assert mapped.leaves[0].tensor.tolist() == [0.0, 2.0, 4.0]
    assert mapped.leaves[0].number == 3
    assert mapped.leaves[1] is None
    assert mapped.own.tolist() == [[2], [4], [6]]
    assert tree().own.tolist() == [[1], [2], [3]]


def test_reordering_picks_rows_everywhere():
    picked = tree().reorder(torch.tensor([2, 0, 2, 1]))
    assert picked.leaves[0].tensor.tolist() == [2.0, 0.0, 2.0, 1.0]
    assert picked.own.tolist() == [[3], [1], [3], [2]]


def test_detaching_cuts_the_graph():
    assert tree().leaves[0].tensor.requires_grad
    assert not tree().detach().leaves[0].tensor.requires_grad


@torch.no_grad()
@pytest.mark.parametrize("preset", ["decoder-tiny", "transformer-tiny"])
@pytest.mark.parametrize("index", [[0, 1, 2], [2, 0, 1], [1, 1], [0, 2, 2, 1, 0]])
def test_a_reordered_state_is_that_of_the_reordered_batch(preset, index):
    model, ids, mask = _model(preset), _ids(5, 0), torch.tensor([[0, 1, 1, 1, 1], [1] * 5, [0, 0, 1, 1, 1]])
    rows, (first, second) = torch.tensor(index), (_ids(2, 1), _ids(1, 2))
    moved = _read(model, first, _start(model, ids, mask)).state.reorder(rows)
    before = _read(model, first[rows], _start(model, ids[rows], mask[rows])).state
    got = _read(model, second[rows], moved)
    expected = _read(model, second[rows], before)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("preset", ["decoder-tiny", "transformer-tiny"])
def test_beams_of_one_source_are_reordered_without_it(preset):
    model, rows = _model(preset), torch.tensor([1, 1, 0, 3, 2, 3])
    ids = _ids(5, 0)[:2].repeat_interleave(3, 0)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5]).repeat_interleave(3, 0)
    index = torch.tensor([2, 2, 1, 3, 5, 4])
    first, second = _ids(2, 1, 6), _ids(1, 2, 6)
    state = _read(model, first, _start(model, ids, mask)).state
    got = _read(model, second[rows], state.reorder_beams(index))
    expected = _read(model, second[rows], state.reorder(index))
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-12, atol=1e-12)


def _model(preset: str):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return create_model(preset, vocab_size=13, hidden_size=12, num_attention_heads=2).double().eval()


def _ids(length: int, seed: int, rows: int = 3) -> Tensor:
    return torch.randint(3, 13, (rows, length), generator=torch.Generator().manual_seed(seed))


def _start(model, ids: Tensor, mask: Tensor):
    if model.encoder is not None:
        return model.encode(ids, mask)
    return model(ids, attention_mask=mask, use_cache=True).state


def _read(model, ids: Tensor, state):
    if model.encoder is not None:
        return model(decoder_input_ids=ids, state=state)
    return model(ids, state=state)
