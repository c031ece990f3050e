"""Translation pairs: both texts in one row, positions anew, a language for every token."""

import numpy as np
import pytest

from polyformer.core.errors import InputError
from polyformer.data.rows.structured import translation_row


def test_by_hand():
    row = translation_row([5, 6, 7], [8, 9], begin_id=1, end_id=2, languages=(3, 0))
    assert {name: values.tolist() for name, values in row.items()} == {
        "input_ids": [1, 5, 6, 7, 2, 1, 8, 9, 2],
        "position_ids": [0, 1, 2, 3, 4, 0, 1, 2, 3],
        "langs": [3, 3, 3, 3, 3, 0, 0, 0, 0],
    }


@pytest.mark.parametrize(
    ("length", "kept"), [(30, (9, 4)), (16, (8, 4)), (12, (4, 4)), (11, (4, 3)), (6, (1, 1))]
)
def test_the_longer_text_is_cut_first(length: int, kept: tuple[int, int]):
    row = translation_row(range(10, 19), range(20, 24), begin_id=1, end_id=2, length=length)
    texts = [row["input_ids"][row["langs"] == language][1:-1].tolist() for language in (0, 1)]
    assert texts == [list(range(10, 10 + kept[0])), list(range(20, 20 + kept[1]))]
    assert len(row["input_ids"]) <= length
    assert np.flatnonzero(row["position_ids"] == 0).tolist() == [0, kept[0] + 2]


def test_an_empty_side_keeps_its_marks():
    row = translation_row([], [8], begin_id=1, end_id=2)
    assert row["input_ids"].tolist() == [1, 2, 1, 8, 2]


def test_a_length_without_room_for_two_texts_is_refused():
    with pytest.raises(InputError, match=r"length: expected 6 tokens or more, .* got 5"):
        translation_row([5], [6], begin_id=1, end_id=2, length=5)
