"""Span corruption is T5's: by hand, by count, by the published lengths, and nothing is lost."""

from collections import Counter

import numpy as np
import pytest
from chances import are_shares
from hypothesis import given
from hypothesis import strategies as st

from polyformer.core.errors import InputError
from polyformer.data.rows.noising import (
    corrupt_spans,
    corrupted_lengths,
    draw_spans,
    random_segments,
    span_counts,
    text_length,
)

EOS, SENTINELS = 1, range(999, 899, -1)


def corrupt(ids, seed: int, **options):
    return corrupt_spans(
        np.array(ids), np.random.default_rng(seed), sentinel_ids=SENTINELS, eos_id=EOS, **options
    )


def test_by_hand(monkeypatch: pytest.MonkeyPatch):
    """Figure 2 of the paper: "Thank you <X> me to your party <Y> week"; here the last word is taken too."""
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week"]
    taken = np.array([word in ("for", "inviting", "last", "week") for word in words])
    monkeypatch.setattr("polyformer.data.rows.noising.draw_spans", lambda *args, **options: taken)
    source, target = corrupt(range(10, 20), 0, density=0.4, mean_span=2)
    assert source.tolist() == [10, 11, 999, 14, 15, 16, 17, 998, 1]
    assert target.tolist() == [999, 12, 13, 998, 18, 19, 1]


def restored(source: list[int], target: list[int]) -> list[int]:
    """The text, each sentinel of the input replaced by what follows it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token in SENTINELS:
            spans[token] = last = []
        else:
            last.append(token)
    return [token for kept in source[:-1] for token in (spans.pop(kept) if kept in SENTINELS else [kept])]


@given(st.integers(2, 300), st.integers(0, 2**32), st.floats(0.01, 0.99), st.floats(1, 20))
def test_the_text_can_be_put_together_again(length: int, seed: int, density: float, mean_span: float):
    ids = list(range(10, 10 + length))
    taken, spans = span_counts(length, density, mean_span)
    if spans > 100:
        return
    source, target = corrupt(ids, seed, density=density, mean_span=mean_span)
    assert restored(source.tolist(), target.tolist()) == ids
    assert source[-1] == target[-1] == EOS
    assert (len(source), len(target)) == corrupted_lengths(length, density, mean_span)
    assert [token for token in source if token in SENTINELS] == list(SENTINELS[:spans])
    assert len(target) == taken + spans + 1


def test_fifteen_percent_in_spans_of_three():
    assert span_counts(568) == (85, 28)
    assert span_counts(100) == (15, 5)
    assert span_counts(2) == (1, 1)
    assert span_counts(10, 0.9, 1.0) == (9, 1)  # no two spans without a token between them


def test_published_lengths():
    """The released code cuts text into 568 tokens for inputs of 512, and gives targets of 114."""
    assert text_length(512) == 568
    assert corrupted_lengths(568) == (512, 114)


@pytest.mark.parametrize("input_length", [3, 4, 17, 128, 509])
def test_the_longest_text_that_fits(input_length: int):
    length = text_length(input_length)
    assert corrupted_lengths(length)[0] <= input_length < corrupted_lengths(length + 1)[0]


def test_every_segmentation_is_as_likely():
    counts = Counter(tuple(random_segments(6, 3, np.random.default_rng(seed))) for seed in range(3000))
    assert len(counts) == 10  # choose 2 cuts of 5
    assert are_shares(list(counts.values()), [1] * 10)


def test_every_arrangement_is_as_likely():
    counts = Counter(
        draw_spans(8, np.random.default_rng(seed), density=0.5, mean_span=2).tobytes() for seed in range(3000)
    )
    assert len(counts) == 9  # 3 ways to cut 4 kept tokens in two, and 3 for 4 taken
    assert are_shares(list(counts.values()), [1] * 9)
    masks = [np.frombuffer(mask, bool) for mask in counts]
    assert all(not mask[0] and mask[-1] and mask.sum() == 4 for mask in masks)


def test_span_lengths_have_their_mean():
    taken = [draw_spans(568, np.random.default_rng(seed)) for seed in range(200)]
    assert all(mask.sum() == 85 for mask in taken)
    assert all((mask & ~np.append(False, mask[:-1])).sum() == 28 for mask in taken)
    # A span has one token where its first is followed by one of 27 cuts in 84 places.
    lengths = [int(random_segments(85, 28, np.random.default_rng(seed))[0]) for seed in range(3000)]
    assert are_shares([lengths.count(1), len(lengths) - lengths.count(1)], [27 / 84, 57 / 84])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: span_counts(10, density=1.0), r"density: expected a share of the tokens in \(0, 1\), got 1"),
        (lambda: span_counts(10, mean_span=0.5), "mean_span: expected 1 token or more, got 0.5"),
        (lambda: span_counts(1), "length: expected 2 tokens or more, .* got 1"),
        (lambda: text_length(2), "input_length: expected 3 tokens or more, got 2"),
        (lambda: corrupt(range(3000), 0), "sentinel_ids: expected 150 or more for a text of 3000 .* got 100"),
    ],
)
def test_densities_lengths_and_sentinels_that_do_not_fit_are_refused(call, message: str):
    with pytest.raises(InputError, match=message):
        call()
