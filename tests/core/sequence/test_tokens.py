"""Positions, documents and validity of tokens over any number of calls."""

import pytest
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs, Tokens


def ids(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def rows(*lists: list[int]) -> Tensor:
    return torch.tensor(lists)


def after(
    tokens: Tokens,
    new: int,
    mask: Tensor | None = None,
    pos: Tensor | None = None,
    doc: Tensor | None = None,
    batch: int = 2,
) -> Tokens:
    return tokens.extended(ModelInputs(ids(batch, new), mask, pos, doc))


def test_without_a_word_positions_are_slots():
    tokens = after(after(NO_TOKENS, 3), 2)
    assert (tokens.length, tokens.valid, tokens.pos, tokens.doc) == (5, None, None, None)
    assert tokens.last(2, torch.device("cpu")).tolist() == [3, 4]


def test_a_mask_of_ones_is_no_mask():
    assert after(NO_TOKENS, 3, mask=torch.ones(2, 3, dtype=torch.long)).valid is None


def test_padding_is_not_counted():
    tokens = after(NO_TOKENS, 4, mask=rows([0, 0, 1, 1], [1, 1, 1, 0]))
    assert tokens.pos is not None
    assert tokens.pos.tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    longer = after(tokens, 2)
    assert longer.pos is not None
    assert longer.valid is not None
    assert longer.pos[:, 4:].tolist() == [[2, 3], [3, 4]]
    assert longer.valid[:, 4:].all()
    assert longer.last(1, torch.device("cpu")).tolist() == [[3], [4]]


def test_a_mask_may_also_cover_the_past():
    first = after(NO_TOKENS, 3, mask=rows([0, 1, 1], [1, 1, 1]))
    whole = after(first, 1, mask=rows([0, 1, 1, 1], [1, 1, 1, 1]))
    part = after(first, 1, mask=rows([1], [1]))
    assert whole.valid is not None
    assert part.valid is not None
    assert torch.equal(whole.valid, part.valid)


def test_documents_count_from_zero_each():
    tokens = after(NO_TOKENS, 5, doc=rows([0, 0, 3, 3, 3], [1, 2, 2, 2, 9]))
    assert tokens.pos is not None
    assert tokens.pos.tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 2, 0]]
    longer = after(tokens, 2, doc=rows([3, 4], [9, 9]))
    assert longer.pos is not None
    assert longer.pos[:, 5:].tolist() == [[3, 0], [1, 2]]


def test_padding_inside_documents_is_not_counted():
    """A packed row with padding in front and behind."""
    tokens = after(NO_TOKENS, 7, mask=rows([0, 0, 1, 1, 1, 1, 0]), doc=rows([0, 0, 0, 0, 1, 1, 1]), batch=1)
    assert tokens.pos is not None
    assert tokens.pos[0, 2:6].tolist() == [0, 1, 0, 1]


def test_without_a_word_the_last_document_goes_on():
    """It must not become document 0, which the tokens before it do not belong to."""
    tokens = after(after(NO_TOKENS, 3, doc=rows([0, 1, 1], [5, 5, 5])), 2)
    assert tokens.doc is not None
    assert tokens.pos is not None
    assert tokens.doc.tolist() == [[0, 1, 1, 1, 1], [5, 5, 5, 5, 5]]
    assert tokens.pos[:, 3:].tolist() == [[2, 3], [3, 4]]


def test_given_positions_go_on():
    first = after(NO_TOKENS, 2, pos=torch.tensor([7, 8]))
    assert first.pos is not None
    assert first.pos.tolist() == [[7, 8], [7, 8]]
    second = after(first, 2)
    assert second.pos is not None
    assert second.pos[:, 2:].tolist() == [[9, 10], [9, 10]]
    masked = after(first, 3, mask=rows([1, 1, 1], [1, 1, 0]))
    assert masked.pos is not None
    assert masked.pos[:, 2:].tolist() == [[9, 10, 11], [9, 10, 10]]
    documents = after(first, 3, doc=rows([0, 1, 1], [0, 0, 1]))
    assert documents.pos is not None
    assert documents.pos[:, 2:].tolist() == [[9, 0, 1], [9, 10, 0]]


def test_the_context_is_of_the_last_tokens():
    context = after(NO_TOKENS, 5, mask=rows([0, 1, 1, 1, 1], [1, 1, 1, 1, 1])).context(2, causal=True)
    assert (context.q_len, context.kv_len, context.causal) == (2, 5, True)
    assert context.q_pos is not None
    assert context.q_pos.tolist() == [[2, 3], [3, 4]]
    assert context.kv_valid is not None
    assert context.kv_valid.tolist() == [[False, True, True, True, True], [True] * 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": rows([1, 0])}, "attention_mask: expected the shape of the ids (2, 3), got (1, 2)"),
        ({"doc": rows([0, 0], [0, 0])}, "document_ids: expected the shape of the ids (2, 3), got (2, 2)"),
        ({"pos": rows([0, 1], [0, 1])}, "position_ids: expected the shape of the ids (2, 3), got (2, 2)"),
        (
            {"doc": rows([0, 1, 0], [0, 0, 0])},
            "document_ids: expected numbers that do not decrease along a row",
        ),
    ],
)
def test_masks_documents_and_positions_of_other_shapes_are_refused(options: dict[str, Tensor], message: str):
    with pytest.raises(InputError) as caught:
        after(NO_TOKENS, 3, **options)
    assert str(caught.value) == message


def test_segments_are_numbers_of_their_own():
    """Any order, missing ones 0, and without a word the last one goes on; every context has them."""
    first = after(NO_TOKENS, 2)
    second = first.extended(ModelInputs(ids(2, 3), segment_ids=rows([4, 1, 4], [0, 0, 2])))
    assert second.segment is not None
    assert second.segment.tolist() == [[0, 0, 4, 1, 4], [0, 0, 0, 0, 2]]
    longer = second.extended(ModelInputs(ids(2, 2)))
    assert longer.segment is not None
    assert longer.segment[:, 5:].tolist() == [[4, 4], [2, 2]]
    context = longer.context(3, causal=True)
    assert context.q_segment is not None
    assert context.kv_segment is not None
    assert context.q_segment.tolist() == [[4, 4, 4], [2, 2, 2]]
    assert context.kv_segment.tolist() == longer.segment.tolist()
    zero = torch.tensor(0)
    same = context.same_segment(zero, torch.arange(3).view(-1, 1), torch.arange(7))
    assert same.tolist() == [[False, False, True, False, True, True, True]] * 3
    with pytest.raises(InputError, match=r"segment_ids: expected the shape of the ids \(2, 3\), got \(3,\)"):
        first.extended(ModelInputs(ids(2, 3), segment_ids=torch.arange(3)))
