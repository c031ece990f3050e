"""Masking does what BERT's paper says, as a pure function of the ids and the generator."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyformer.core.errors import InputError
from polyformer.data.corruption import mask_tokens

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
    # four standard deviations of a share in 15,000 draws; a random token equals the old one in 1 of 1,000
    assert masked.mean() == pytest.approx(0.8, abs=4 * (0.8 * 0.2 / 15_000) ** 0.5)
    assert kept.mean() == pytest.approx(0.1001, abs=4 * (0.1 * 0.9 / 15_000) ** 0.5)
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


def test_refuses_impossible_shares():
    with pytest.raises(InputError, match=r"share: expected a share of the tokens in \(0, 1\], got 0"):
        mask([5], share=0)
    with pytest.raises(InputError, match=r"expected a sum of at most 1, got 0.6 and 0.5"):
        mask([5], random_share=0.6, kept_share=0.5)
