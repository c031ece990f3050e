"""K5 state: any split into chunks is one pass; state is a value that can be reordered, detached and saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from members import LENGTH, Case, assert_same, gradients
from safetensors.torch import load_file, save_file
from selection import DECODING, cases
from shared_models import plain, shared
from torch import Tensor

from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelState

STATES = pytest.mark.parametrize(
    "case", cases("state", "causal", "supports_kv_cache", shape=DECODING), ids=str
)
SPLITS = [[1] * 7, [4, 1, 2]]
LEARNED = [[4, 1, 2], [1, 6]]
"""The splits through which gradients are taken."""


def ids_of(case: Case, batch: dict[str, Tensor]) -> Tensor:
    return batch["decoder_input_ids" if case.shape == "pair" else "input_ids"][:, :7]


def whole(case: Case, model: Transformer, batch: dict[str, Tensor], **options: Tensor) -> Tensor:
    key = "decoder_input_ids" if case.shape == "pair" else "input_ids"
    return model(**{**batch, key: ids_of(case, batch)}, **options).last_hidden_state


def start(case: Case, model: Transformer, batch: dict[str, Tensor], mask: Tensor | None = None) -> ModelState:
    return model.encode(batch["input_ids"], mask) if case.shape == "pair" else model.new_state()


def step(
    case: Case, model: Transformer, ids: Tensor, state: ModelState, **options: Any
) -> tuple[Tensor, ModelState]:
    key = "decoder_input_ids" if case.shape == "pair" else "input_ids"
    output = model(**{key: ids}, state=state, **options)
    assert output.state is not None
    return output.last_hidden_state, output.state


def chunked(case: Case, model: Transformer, ids: Tensor, split: list[int], state: ModelState) -> Tensor:
    outputs = []
    for part in ids.split(split, 1):
        hidden, state = step(case, model, part, state)
        outputs.append(hidden)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("case", cases("split", "causal", "supports_kv_cache", shape=DECODING), ids=str)
def test_any_split_is_one_pass(case: Case):
    """In evaluation and under autograd, whose gradients flow through the state too, but not into the hidden
    states of a memory."""
    model, batch = shared(case), case.batch()
    expected = whole(case, model, batch)
    memory = None if model.decoder is None else model.decoder.memory
    constant = memory is not None and not memory.supports_kv_cache
    slopes = gradients(model, expected.square().sum())
    for split in SPLITS:
        with torch.no_grad():
            assert_same(chunked(case, model, ids_of(case, batch), split, start(case, model, batch)), expected)
    for split in LEARNED:
        output = chunked(case, model, ids_of(case, batch), split, start(case, model, batch))
        assert_same(output, expected)
        if not constant:
            assert_same(gradients(model, output.square().sum()), slopes)


@torch.no_grad()
@pytest.mark.parametrize(
    "case", cases("kept padding", "causal", "supports_kv_cache", shape=DECODING), ids=str
)
def test_padding_stays_padding_in_the_state(case: Case):
    """The prompt is padded on the left, or the source on both sides; later chunks say nothing about it."""
    model, batch = shared(case), case.batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :3] = 0
    name = "attention_mask"
    if case.shape == "pair":
        mask[1, -2:] = 0
        expected = whole(case, model, batch, attention_mask=mask)
        assert_same(
            chunked(case, model, ids_of(case, batch), [2, 1, 4], start(case, model, batch, mask)), expected
        )
        return
    expected = model(batch["input_ids"], attention_mask=mask).last_hidden_state
    first, state = step(
        case, model, batch["input_ids"][:, :5], start(case, model, batch), **{name: mask[:, :5]}
    )
    rest = chunked(case, model, batch["input_ids"][:, 5:], [1, 1, LENGTH - 7], state)
    real = mask.bool()
    assert_same(torch.cat([first, rest], 1)[real], expected[real])
    again, _ = step(case, model, batch["input_ids"][:, 5:], state, **{name: mask})
    assert_same(again, rest)


@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    cases("kept padding", "causal", "supports_kv_cache", "supports_packing", shape=("decoder",)),
    ids=str,
)
def test_documents_stay_apart_across_chunks(case: Case):
    model, ids = shared(case), case.batch()["input_ids"]
    numbers = torch.tensor([0, 0, 0, 4, 4, 4, 4, 4, 5, 5, 5]).expand_as(ids)
    expected = model(ids, document_ids=numbers).last_hidden_state
    state, outputs = model.new_state(), []
    for part, number in zip(ids.split([2, 3, 1, 5], 1), numbers.split([2, 3, 1, 5], 1)):
        hidden, state = step(case, model, part, state, document_ids=number)
        outputs.append(hidden)
    assert_same(torch.cat(outputs, 1), expected)


@torch.no_grad()
@STATES
def test_a_state_can_be_reordered(case: Case):
    """Rows may be dropped, repeated and moved, as beam search does."""
    model, batch = shared(case), case.batch(rows=3)
    order = torch.tensor([2, 0, 0, 1])
    ids = ids_of(case, batch)
    _, state = step(case, model, ids[:, :4], start(case, model, batch))
    state = state.reorder(order)
    output = chunked(case, model, ids[order, 4:], [1, 2], state)
    assert_same(output, whole(case, model, batch)[order, 4:])


@torch.no_grad()
@STATES
def test_a_state_is_a_value(case: Case):
    """Going on from it in two ways, and from its copies, leaves each continuation what it is alone."""
    model, batch = shared(case), case.batch()
    ids = ids_of(case, batch)
    copies = (
        lambda state: state,
        lambda state: state.detach(),
        lambda state: state.reorder(torch.arange(len(ids))),
    )
    mixed = {**batch, "input_ids": torch.cat([ids[:, :3], ids[:, 3:5].flip(0, 1), ids[:, 5:]], 1)}
    if case.shape == "pair":
        mixed = {"input_ids": batch["input_ids"], "decoder_input_ids": mixed["input_ids"]}
    first, second = (whole(case, model, each)[:, 5:] for each in (batch, mixed))
    for copied in copies:
        _, state = step(case, model, ids[:, :3], start(case, model, batch))
        copy = copied(state)
        _, mine = step(case, model, ids[:, 3:5], state)
        _, other = step(case, model, ids[:, 3:5].flip(0, 1), copy)
        hidden, _ = step(case, model, ids[:, 5:], mine)
        assert_same(hidden, first)
        ours, _ = step(case, model, ids[:, 5:], other)
        assert_same(ours, second)


@torch.no_grad()
@STATES
def test_tokens_can_be_taken_back_or_the_state_says_so(case: Case):
    """In the same buffer; where a state takes none back, the one before it goes on."""
    model, batch = shared(case), case.batch()
    ids = ids_of(case, batch)
    _, before = step(case, model, ids[:, :3], start(case, model, batch))
    _, after = step(case, model, ids[:, [0, 2, 1]], before)
    shorter = after.truncated_(2)
    if shorter is None:
        _, shorter = step(case, model, ids[:, :1], before)
    assert shorter.tokens.length == 4
    ids = torch.cat([ids[:, :3], ids[:, :1], ids[:, 3:6]], 1)
    hidden, _ = step(case, model, ids[:, 4:], shorter)
    name = "input_ids" if case.shape == "decoder" else "decoder_input_ids"
    assert_same(hidden, model(**{**batch, name: ids}).last_hidden_state[:, 4:])


@STATES
def test_a_detached_state_ends_the_graph_and_can_be_saved(case: Case, tmp_path: Path):
    """Its tensors in a file, put back into the shape of another state."""
    model, batch = shared(case), case.batch()
    ids = ids_of(case, batch)
    _, state = step(case, model, ids[:, :4], start(case, model, batch))
    tensors: list[Tensor] = []
    detached = state.detach()
    detached.map(lambda tensor: tensors.append(tensor) or tensor)
    assert tensors
    assert not any(tensor.requires_grad for tensor in tensors)
    save_file(
        {str(i): tensor.contiguous() for i, tensor in enumerate(tensors)}, tmp_path / "state.safetensors"
    )
    by_name = load_file(tmp_path / "state.safetensors")
    numbers = iter(range(len(by_name)))
    restored = state.map(lambda _: by_name[str(next(numbers))])
    expected = whole(case, model, batch)[:, 4:]
    for kept in (detached, restored):
        hidden, _ = step(case, model, ids[:, 4:], kept)
        assert_same(hidden, expected)
        assert any(slope.any() for slope in gradients(model, hidden.sum()).values())


def test_score_depends_on_the_output():
    """The number that other contracts take gradients of is not constant."""
    _, slopes = plain(cases("split", "causal", "supports_kv_cache", shape=DECODING)[0])
    assert any(slope.abs().max() > 0 for slope in slopes.values())
