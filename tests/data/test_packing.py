"""Packing loses nothing, keeps documents apart, and predicts each token as often as it says."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyformer.core.errors import InputError
from polyformer.data.rows.packing import pack

documents = st.lists(st.lists(st.integers(0, 999), max_size=30), max_size=12)


def kept(row):
    return row["attention_mask"].astype(bool)


@given(documents, st.integers(1, 11))
def test_nothing_is_lost_and_order_is_kept(texts, length):
    rows = list(pack(texts, length, pad_id=7))
    assert all(array.shape == (length,) for row in rows for array in row.values())
    tokens = [int(token) for row in rows for token in row["input_ids"][kept(row)]]
    assert tokens == list(itertools.chain(*texts))
    assert all(kept(row).all() for row in rows[:-1]), "only the last row may be padded"


@given(documents, st.integers(1, 11))
def test_dropping_leaves_out_the_partial_row_only(texts, length):
    padded, dropped = list(pack(texts, length)), list(pack(texts, length, last="drop"))
    whole = [row for row in padded if kept(row).all()]
    assert len(dropped) == len(whole)
    for row, other in zip(dropped, whole):
        assert "attention_mask" not in row
        assert all((row[key] == other[key]).all() for key in row)


@given(documents, st.integers(1, 11))
def test_positions_restart_with_every_document(texts, length):
    for row in pack(texts, length):
        starts = np.flatnonzero(np.diff(row["document_ids"], prepend=-1))
        assert (row["document_ids"] == np.searchsorted(starts, np.arange(length), side="right") - 1).all()
        expected = np.arange(length) - starts[row["document_ids"]]
        assert (row["position_ids"] == expected).all()


def test_one_row_by_hand():
    first, second = pack([[1, 2, 3], [4, 5, 6]], 4, pad_id=9)
    assert first["input_ids"].tolist() == [1, 2, 3, 4]
    assert first["document_ids"].tolist() == [0, 0, 0, 1]
    assert first["position_ids"].tolist() == [0, 1, 2, 0]
    assert first["labels"].tolist() == [1, 2, 3, 4]
    assert second["input_ids"].tolist() == [5, 6, 9, 9]
    assert second["document_ids"].tolist() == [0, 0, 1, 1]
    assert second["position_ids"].tolist() == [0, 1, 0, 1]
    assert second["labels"].tolist() == [5, 6, -100, -100]
    assert second["attention_mask"].tolist() == [1, 1, 0, 0]


@given(documents, st.integers(2, 11))
def test_an_overlap_of_one_predicts_everything_but_first_tokens_once(texts, length):
    """A model that shifts labels predicts the tokens after the first of each piece."""
    predicted = []
    for row in pack(texts, length, overlap=1):
        same = np.diff(row["document_ids"]) == 0
        predicted += row["labels"][1:][same & (row["labels"][1:] != -100)].tolist()
    assert predicted == [token for text in texts for token in text[1:]]


@given(documents, st.integers(2, 11), st.data())
def test_an_overlap_repeats_without_labels(texts, length, data):
    overlap = data.draw(st.integers(0, length - 1))
    rows = list(pack(texts, length, overlap=overlap))
    labels = [int(token) for row in rows for token in row["labels"] if token != -100]
    assert labels == list(itertools.chain(*texts))
    for row, after in itertools.pairwise(rows):
        repeated = int((after["labels"][kept(after)] == -100).sum())
        assert repeated <= overlap
        assert after["input_ids"][:repeated].tolist() == row["input_ids"][length - repeated :].tolist()


def test_is_lazy():
    rows = pack(([number] for number in itertools.count()), 3)
    assert next(rows)["input_ids"].tolist() == [0, 1, 2]


def test_rows_of_no_token_and_a_whole_overlap_are_refused():
    with pytest.raises(InputError, match="length: expected at least 1 token per row, got 0"):
        list(pack([], 0))
    with pytest.raises(InputError, match="overlap: expected 0 to 3 for rows of 4 tokens, got 4"):
        list(pack([], 4, overlap=4))
