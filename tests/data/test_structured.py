"""Sentences to rows [global; long]: by hand, at the limits, and on real text through a model."""

import numpy as np
import pytest
import torch

from polyformer.attention.patterns import ETC
from polyformer.attention.positions import EtcLabelsConfig
from polyformer.core.errors import InputError
from polyformer.data import Collate, default_documents
from polyformer.data.rows.structured import documents_of, split_sentences, structured
from polyformer.models.presets import create_model

GLOBAL, RADIUS = 8, 4


def test_a_document_by_hand():
    row = structured([[11, 12], [13]], global_id=1, global_tokens=4)
    assert {name: array.tolist() for name, array in row.items()} == {
        "input_ids": [1, 1, 11, 12, 13],
        "segment_ids": [0, 1, 0, 0, 1],
        "position_ids": [0, 1, 4, 5, 6],
        "token_type_ids": [0, 0, 1, 1, 1],
        "attention_mask": [1, 1, 1, 1, 1],
    }
    assert all(array.dtype == np.int64 for array in row.values())


def test_sentences_end_where_readers_see_it():
    text = "One, e.g.this. Two? Yes!\n\nA heading\n\nLast one"
    assert split_sentences(text) == ["One, e.g.this.", "Two?", "Yes!", "A heading", "Last one"]
    assert split_sentences(" \n\n ") == []


def test_documents_keep_all_tokens_and_both_limits():
    sentences = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10, 11, 12, 13], [14]]
    documents = documents_of(sentences, global_tokens=2, long_tokens=5)
    assert documents == [[[1, 2, 3], [4]], [[5, 6]], [[7, 8, 9, 10, 11]], [[12, 13], [14]]]
    assert documents_of([], global_tokens=2, long_tokens=5) == []


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        ([], "sentences: expected 1 to 2 (global_tokens), got 0; cut the document"),
        ([[1], [2], [3]], "sentences: expected 1 to 2 (global_tokens), got 3; cut the document"),
        ([[1], []], "sentences: expected tokens in each, got none in number 1; leave it out"),
    ],
)
def test_documents_of_no_or_too_many_sentences_are_refused(sentences: list[list[int]], message: str):
    with pytest.raises(InputError) as caught:
        structured(sentences, global_id=1, global_tokens=2)
    assert str(caught.value).startswith(message)


def test_limits_below_one_are_named():
    with pytest.raises(InputError, match="global_tokens, long_tokens: expected 1 or more, got 0 and 5"):
        documents_of([[1]], global_tokens=0, long_tokens=5)


def test_padding_stays_in_the_long_part():
    """Where it costs a window; at position 0 a layout would give it the whole row."""
    rows = [structured(sentences, global_id=1, global_tokens=4) for sentences in ([[5, 6, 7]], [[5]])]
    assert Collate(pad_id=0)(rows)["position_ids"].tolist() == [[0, 4, 5, 6], [0, 4, 4, 4]]


def test_real_text_goes_through_a_model_as_if_every_row_were_alone():
    """Rows of many lengths in a batch, and padded slots in place of those left out, change nothing."""
    sentences = [list(sentence.encode()) for sentence in split_sentences(default_documents()[0][:1500])]
    assert len(sentences) > 8
    documents = documents_of(sentences, global_tokens=GLOBAL, long_tokens=200)
    rows = [structured(document, global_id=256, global_tokens=GLOBAL) for document in documents]
    assert sum((row["token_type_ids"] == 1).sum() for row in rows) == sum(map(len, sentences))
    model = (
        create_model(
            "encoder-tiny",
            attention=ETC(GLOBAL, RADIUS, hard_g2l=True),
            max_position_embeddings=64,
            position=EtcLabelsConfig(global_tokens=GLOBAL, max_distance=3),
            type_vocab_size=2,
        )
        .double()
        .eval()
    )
    batch = Collate(pad_id=0)(rows)
    together = model(**batch).last_hidden_state
    for number, row in enumerate(rows):
        alone = model(**Collate(pad_id=0)([row])).last_hidden_state[0]
        torch.testing.assert_close(together[number, : len(alone)], alone, rtol=1e-10, atol=1e-10)
    last, present = rows[-1], len(documents[-1])
    slots = np.arange(GLOBAL - present)
    assert len(slots) > 0
    padded = {name: np.insert(array, np.full(len(slots), present), 0) for name, array in last.items()}
    padded["position_ids"][present:GLOBAL] = slots + present
    output = model(**Collate(pad_id=0)([padded])).last_hidden_state[0]
    kept = torch.from_numpy(padded["attention_mask"]).bool()
    torch.testing.assert_close(output[kept], together[-1, : len(last["input_ids"])], rtol=1e-10, atol=1e-10)
