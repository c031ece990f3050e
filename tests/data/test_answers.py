"""Windows, spans and characters: by hand, and answers found again in every kind of tokens."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.formats.published import normal_form, read_squad
from polyformer.data.rows.structured import (
    answer_text,
    answer_tokens,
    best_span,
    encode_with_offsets,
    windows,
)

MARKS = {"cls_id": 1, "sep_id": 2}


def test_windows_by_hand():
    cut = windows([7], [10, 11, 12, 13, 14, 15], length=7, stride=2, **MARKS)
    assert [window.input_ids for window in cut] == [
        [1, 7, 2, 10, 11, 12, 2],
        [1, 7, 2, 12, 13, 14, 2],
        [1, 7, 2, 14, 15, 2],
    ]
    assert cut[2].token_type_ids == [0, 0, 0, 1, 1, 1]
    assert [(window.place, window.first, window.size) for window in cut] == [(3, 0, 3), (3, 2, 3), (3, 4, 2)]
    assert [window.labels((2, 2)) for window in cut] == [(5, 5), (3, 3), (0, 0)]
    assert [window.labels((1, 3)) for window in cut] == [(0, 0)] * 3  # whole in none
    assert [window.labels(None) for window in cut] == [(0, 0)] * 3


def test_windows_cover_the_text_and_none_is_in_vain():
    for stride in (1, 2, 4):
        for size in range(12):
            cut = windows([7, 8], range(10, 10 + size), length=9, stride=stride, **MARKS)
            seen = {window.first + i for window in cut for i in range(window.size)}
            assert seen == set(range(size))
            assert all(window.first + window.size < size for window in cut[:-1])
            assert all(len(window.input_ids) <= 9 for window in cut)


def test_tokens_of_an_answer():
    offsets = [(0, 2), (2, 7), (7, 7), (7, 9)]
    assert answer_tokens(offsets, 3, 4) == (1, 1)  # a part of a token
    assert answer_tokens(offsets, 1, 8) == (0, 3)
    assert answer_tokens(offsets, 2, 7) == (1, 1)
    assert answer_tokens(offsets, 9, 12) is None
    assert answer_text("ab cdefgh", offsets, 1, 1) == "cdef"


def test_the_best_span():
    starts, ends = np.array([0.0, 3.0, 1.0, 2.5]), np.array([4.0, 0.0, 1.0, 2.0])
    assert best_span(starts, ends, 3) == (1, 3, 5.0)
    assert best_span(starts, ends, 2) == (3, 3, 4.5)  # 1 to 3 is too long, and 1 to 0 none
    generator = np.random.default_rng(0)
    for longest in (1, 4, 20):
        starts, ends = generator.normal(size=(2, 9))
        every = [(starts[i] + ends[j], i, j) for i in range(9) for j in range(i, min(i + longest, 9))]
        score, first, last = max(every)
        assert best_span(starts, ends, longest) == (first, last, score)


@pytest.mark.parametrize("algorithm", ["bytes", "bpe", "wordpiece", "unigram"])
def test_answers_come_back(algorithm, shared_data: Callable[[str], Path]):
    """Characters to tokens and back, for every answer of a real data set: the same in normal form.

    A token may hold more than the answer's characters ("1895-96" is one word of the text).
    """
    rows = list(read_squad(shared_data("xquad") / "xquad.vi.json"))[:150]
    texts = [row["context"] for row in rows]
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm=algorithm, vocab_size=900), texts)
    exact = 0
    for row, (ids, offsets) in zip(rows, encode_with_offsets(tokenizer, texts)):
        assert len(ids) == len(offsets)
        (text,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
        tokens = answer_tokens(offsets, start, start + len(text))
        assert tokens is not None
        back = answer_text(row["context"], offsets, *tokens)
        assert text.strip() in back
        exact += normal_form(back) == normal_form(text)
    assert exact >= 0.95 * len(rows)
