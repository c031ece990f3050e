"""A shuffled order that is computed: a permutation, another for each key, and no worse than chance."""

import numpy as np
from chances import are_shares

from polyformer.data.prepared.rows import shuffled


def test_every_number_has_one_place():
    for count in (*range(1, 40), 64, 65, 1000, 4097):
        for key in range(3):
            assert sorted(shuffled(np.arange(count), count, 7, key).tolist()) == list(range(count))


def test_places_are_computed_by_themselves_in_any_shape():
    whole = shuffled(np.arange(1000), 1000, 3)
    assert shuffled(np.array([[5, 999], [0, 5]]), 1000, 3).tolist() == [
        [whole[5], whole[999]],
        [whole[0], whole[5]],
    ]
    assert not np.array_equal(whole, shuffled(np.arange(1000), 1000, 4))
    huge = shuffled(np.arange(1000), 10**12, 3)
    assert len({*huge.tolist()}) == 1000
    assert 0 <= huge.min() < 10**10 < 9.9e11 < huge.max() < 10**12


def test_no_place_is_more_likely_than_another():
    """Of 5 things, where each stands; of 50, which two are neighbours' distances."""
    orders = np.array([shuffled(np.arange(5), 5, key) for key in range(800)])
    for place in range(5):
        assert are_shares(np.bincount(orders[:, place], minlength=5).tolist(), [1.0] * 5)
    steps = np.concatenate([np.diff(shuffled(np.arange(50), 50, key)) % 50 for key in range(150)])
    assert are_shares(np.bincount(steps, minlength=50)[1:].tolist(), [1.0] * 49)
