"""Masking does what BERT's paper says, as a pure function of the ids and the generator."""

import numpy as np
import pytest
from chances import are_shares, is_share
from hypothesis import given
from hypothesis import strategies as st

from polyformer.core.errors import InputError
from polyformer.data.rows.masking import draw_runs, mask_tokens

MASK, SPECIAL, ORDINARY = 4, range(5), np.arange(5, 1005)


def mask(ids, seed=0, **options):
    return mask_tokens(
        np.array(ids), np.random.default_rng(seed), mask_id=MASK, ordinary_ids=ORDINARY, **options
    )


@given(st.lists(st.integers(0, 1004), max_size=60), st.integers(0, 2**32), st.floats(0.01, 1))
def test_labels_are_the_truth_and_special_tokens_stay(ids, seed, share):
    corrupted, labels = mask(ids, seed, share=share)
    chosen = labels != -100
    assert (corrupted[~chosen] == np.array(ids, int)[~chosen]).all()
    assert (labels[chosen] == np.array(ids, int)[chosen]).all()
    assert not np.isin(labels[chosen], list(SPECIAL)).any()
    ordinary = sum(token in ORDINARY for token in ids)
    assert chosen.sum() == min(ordinary, max(1, round(share * ordinary)))
    again = mask(ids, seed, share=share)
    assert (again[0] == corrupted).all()
    assert (again[1] == labels).all()


def test_shares_are_fifteen_percent_of_which_eighty_ten_ten():
    ids = np.random.default_rng(1).choice(ORDINARY, 100_000)
    corrupted, labels = mask(ids)
    chosen = labels != -100
    assert chosen.sum() == 15_000
    masked, kept = corrupted[chosen] == MASK, corrupted[chosen] == ids[chosen]
    # a random token equals the old one in 1 of 1,000
    assert are_shares(
        [masked.sum(), kept.sum(), 15_000 - masked.sum() - kept.sum()], [0.8, 0.1 + 0.1 / 1000, 0.0999]
    )
    random = corrupted[chosen][~masked & ~kept]
    assert np.isin(random, ORDINARY).all()
    assert len(np.unique(random)) > 500


def test_another_seed_masks_elsewhere():
    ids = np.arange(5, 205)
    assert (mask(ids, 0)[1] != mask(ids, 1)[1]).any()


def test_the_ids_given_are_left_alone():
    ids = np.arange(5, 105)
    before = ids.copy()
    mask(ids)
    assert (ids == before).all()


def test_shares_out_of_range_are_refused():
    with pytest.raises(InputError, match=r"share: expected a share of the tokens in \(0, 1\], got 0"):
        mask([5], share=0)
    with pytest.raises(InputError, match=r"expected a sum of at most 1, got 0.6 and 0.5"):
        mask([5], random_share=0.6, kept_share=0.5)


# Word 0: 10 11 12; words 1 and 2: 13, 14; a special token; word 3: 15 16.
IDS = [10, 11, 12, 13, 14, 2, 15, 16]
STARTS = ~np.isin(np.arange(1005), [11, 12, 16])
WORDS = [{0, 1, 2}, {3}, {4}, {6, 7}]


def hidden(seed, **options):
    return set(np.flatnonzero(mask(IDS, seed, **options)[1] != -100).tolist())


def test_whole_words_by_hand():
    """Two tokens of seven: word 3, or words 1 and 2; word 0 is too long and never chosen."""
    chosen = [hidden(seed, share=0.3, starts=STARTS) for seed in range(400)]
    assert {frozenset(places) for places in chosen} == {frozenset({6, 7}), frozenset({3, 4})}
    # Word 3 is taken when it comes before words 1 and 2; else one of these leaves no room for it.
    assert is_share(chosen.count({6, 7}), 400, 1 / 3)


def test_a_word_is_hidden_whole_or_not_at_all():
    for seed in range(200):
        chosen = hidden(seed, share=0.6, starts=STARTS, longest=3)
        assert all(word <= chosen or not word & chosen for word in WORDS)
        assert len(chosen) <= round(0.6 * 7)


def test_a_word_ends_at_a_special_token():
    """What follows it begins a word, though the token does not say so: one of two words is hidden."""
    for seed in range(20):
        _, labels = mask([10, 2, 11], seed, share=0.5, starts=STARTS)
        assert (labels != -100).sum() == 1


def test_a_word_longer_than_the_share_leaves_nothing_to_guess():
    corrupted, labels = mask([10, 11, 12], share=0.2, starts=STARTS)
    assert (labels == -100).all()
    assert corrupted.tolist() == [10, 11, 12]


def test_runs_have_lengths_one_to_three_with_probability_by_their_inverse():
    """ALBERT, section 4.1: p(n) = (1/n) / (1 + 1/2 + 1/3), here of the first run drawn in a long text."""
    candidates, edges = np.arange(3000), np.arange(3001)
    lengths = [draw_runs(candidates, edges, 5, 3, np.random.default_rng(seed))[0][1] for seed in range(4000)]
    assert are_shares(np.bincount(lengths, minlength=4)[1:], [1, 1 / 2, 1 / 3])
    assert not are_shares(np.bincount(lengths, minlength=4)[1:], [1, 1, 1])


def test_runs_are_shortened_to_the_share_and_do_not_meet():
    candidates, edges = np.arange(60), np.arange(61)
    for seed in range(100):
        runs = draw_runs(candidates, edges, 20, 3, np.random.default_rng(seed))
        words = [first + i for first, n in runs for i in range(n)]
        assert len(words) == len(set(words)) == 20
        assert max(words) < 60


def test_no_run_crosses_a_special_token():
    candidates = np.array([0, 1, 3, 4])  # 2 is special
    for seed in range(100):
        for first, n in draw_runs(candidates, np.arange(5), 4, 3, np.random.default_rng(seed)):
            assert not first <= 1 < first + n - 1


def test_every_word_is_as_likely_as_any_other():
    ids, starts = np.arange(5, 105), np.isin(np.arange(1005), np.arange(5, 105, 2))
    counts = sum((mask(ids, seed, starts=starts)[1] != -100).astype(int) for seed in range(2000))
    assert (counts[::2] == counts[1::2]).all()
    assert all(is_share(count, 2000, 7 / 50) for count in counts[::2])


def test_a_longest_run_of_zero_is_refused():
    with pytest.raises(InputError, match="longest: expected 1 unit or more, got 0"):
        mask([5], longest=0)
