"""BART's noises: each by hand, by count, and joined."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from chances import are_shares, is_share
from scipy import stats

from polyformer.core.errors import InputError
from polyformer.data.rows.noising import (
    NoiseConfig,
    apply_noises,
    delete_some,
    draw_lengths,
    infill,
    mask_some,
    permute_sentences,
    rotate,
)

MASK = 3
TEXT = np.arange(10, 110)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


class Script:
    """A generator that returns scripted values."""

    def __init__(self, lengths: list[int], order: list[int]):
        self.lengths, self.order = lengths, order

    def poisson(self, mean: float) -> int:
        assert mean == 3
        return self.lengths.pop(0)

    def permutation(self, number: int) -> np.ndarray:
        assert number == len(self.order)
        return np.array(self.order)


def test_infilling_by_hand():
    """Figure 2 of the paper: A B C . D E . with spans of B C . (here with a full stop) and of nothing."""
    # Eight tokens, half of them hidden: spans of 3, 0 and 1 (2 were drawn) are things 4, 1 and 5 of seven.
    script: Any = Script([3, 0, 2], [4, 1, 5, 0, 2, 3, 6])
    corrupted = infill(np.array([10, 11, 12, 13, 14, 15, 16, 17]), script, mask_id=MASK, share=0.5)
    assert corrupted.tolist() == [10, 3, 11, 12, 3, 3, 17]


def test_masked_tokens_are_a_share_anywhere():
    counts = sum((mask_some(TEXT, rng(seed), mask_id=MASK) == MASK).astype(int) for seed in range(2000))
    assert counts.sum() == 15 * 2000
    assert all(is_share(count, 2000, 0.15) for count in counts)
    kept = mask_some(TEXT, rng(0), mask_id=MASK)
    assert (kept[kept != MASK] == TEXT[kept != MASK]).all()


def test_deleted_tokens_are_a_share_anywhere():
    left = Counter(token for seed in range(2000) for token in delete_some(TEXT, rng(seed)).tolist())
    assert all(is_share(left[token], 2000, 0.85) for token in TEXT.tolist())
    corrupted = delete_some(TEXT, rng(0))
    assert len(corrupted) == 85
    assert (np.diff(corrupted) > 0).all()


def test_span_lengths_are_poisson():
    lengths = draw_lengths(60_000, 3.0, rng(1))[:-1].tolist()
    counts = [lengths.count(n) for n in range(10)]
    assert are_shares(
        [*counts, len(lengths) - sum(counts)], [*stats.poisson.pmf(range(10), 3), stats.poisson.sf(9, 3)]
    )
    assert draw_lengths(60_000, 3.0, rng(1)).sum() == 60_000
    assert len(draw_lengths(0, 3.0, rng(1))) == 0


def test_infilling_hides_its_share_and_keeps_the_order():
    for seed in range(300):
        corrupted = infill(TEXT, rng(seed), mask_id=MASK)
        kept = corrupted[corrupted != MASK]
        assert len(kept) == 70
        assert (np.diff(kept) > 0).all()
        lengths = draw_lengths(30, 3.0, rng(seed))
        assert (corrupted == MASK).sum() == len(lengths)


@pytest.mark.parametrize(("lengths", "ways"), [([1], 4), ([0, 1], 20)])
def test_every_arrangement_is_as_likely(lengths: list[int], ways: int):
    """One of four tokens is hidden; then a span of nothing stands at any of five places before or behind."""
    seen = Counter()
    for seed in range(4000):
        script: Any = Script(list(lengths), [])
        script.permutation = rng(seed).permutation
        corrupted = infill(np.arange(10, 14), script, mask_id=MASK, share=0.25)
        seen[tuple(corrupted.tolist())] += 1
    # A mask for nothing on either side of a mask for a token: four of the outcomes come about in two ways.
    twice = [sum(pair == (MASK, MASK) for pair in itertools.pairwise(text)) for text in seen]
    assert len(seen) + sum(twice) == ways
    assert are_shares(list(seen.values()), [1 + n for n in twice])


def test_sentences_by_hand():
    ids = np.array([5, 1, 6, 7, 1, 1, 8])
    orders_seen = Counter(
        tuple(permute_sentences(ids, rng(seed), end_ids=np.array([1])).tolist()) for seed in range(3000)
    )
    first, second, third = (5, 1), (6, 7, 1, 1), (8,)
    orders = [
        (first, second, third),
        (first, third, second),
        (second, first, third),
        (second, third, first),
        (third, first, second),
        (third, second, first),
    ]
    assert set(orders_seen) == {sum(order, ()) for order in orders}
    assert are_shares(list(orders_seen.values()), [1] * 6)


def test_a_text_without_an_end_is_one_sentence():
    assert permute_sentences(TEXT, rng(0), end_ids=np.array([1])).tolist() == TEXT.tolist()
    assert permute_sentences(np.array([], int), rng(0), end_ids=np.array([1])).tolist() == []


def test_a_rotation_starts_anywhere():
    ids = np.arange(5)
    rotations = Counter(tuple(rotate(ids, rng(seed)).tolist()) for seed in range(2000))
    assert set(rotations) == {(*range(i, 5), *range(i)) for i in range(5)}
    assert are_shares(list(rotations.values()), [1] * 5)
    assert rotate(ids[:0], rng(0)).tolist() == []


def test_noises_are_joined_in_order():
    ends = np.array([19, 39, 59, 79, 99])
    config = NoiseConfig(rotate=True, delete=0.1, infill=0.2, mask=0.1)
    corrupted = apply_noises(TEXT, rng(4), config, mask_id=MASK, end_ids=ends)
    by_hand = rng(4)
    expected = rotate(permute_sentences(TEXT, by_hand, end_ids=ends), by_hand)
    expected = infill(delete_some(expected, by_hand, share=0.1), by_hand, mask_id=MASK, share=0.2)
    assert (corrupted == mask_some(expected, by_hand, mask_id=MASK, share=0.1)).all()
    nothing = NoiseConfig(permute=False, infill=0.0)
    assert (apply_noises(TEXT, rng(0), nothing, mask_id=MASK) == TEXT).all()


def test_by_default_what_bart_is_trained_with():
    """Section 5.1: "we mask 30% of tokens in each document, and permute all sentences"."""
    corrupted = apply_noises(TEXT, rng(0), NoiseConfig(), mask_id=MASK, end_ids=np.array([29, 59]))
    kept = corrupted[corrupted != MASK]
    assert len(kept) == 70
    sentence = np.digitize(kept, [30, 60])
    assert (np.diff(sentence) != 0).sum() == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NoiseConfig(infill=1.0), r"infill: expected a share of the tokens in \[0, 1\), got 1"),
        (lambda: NoiseConfig(mean_span=0.0), r"mean_span: expected a number above 0, got 0\.0"),
        (
            lambda: apply_noises(TEXT, rng(0), NoiseConfig(), mask_id=MASK),
            "end_ids: expected the tokens that",
        ),
        (lambda: delete_some(TEXT, rng(0), share=-0.1), "share: expected a share of the tokens"),
        (lambda: infill(TEXT, rng(0), mask_id=MASK, mean_span=-1), "mean_span: expected a number above 0"),
    ],
)
def test_noise_out_of_range_is_refused(call, message: str):
    with pytest.raises(InputError, match=message):
        call()
