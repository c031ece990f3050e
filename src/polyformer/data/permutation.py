"""A shuffled order without memory: the item at each position is computed instead of stored.

    x = (left, right), 2 h bits;   (left, right) <- (right, left ^ F_k(right))   for k = 1, ..., 12

A Feistel network permutes the numbers of 2 h bits, for any F; here F is a hash of its input and the key of
each round. To permute only n numbers, results outside go through the network again until they are inside
("cycle walking"): at most four passes on average, for 2^(2 h) < 4 n. Source: Luby and Rackoff 1988; Black and
Rogaway 2002 (Ciphers with arbitrary finite domains), section 3.
"""

import numpy as np

TURNS = 12


def shuffled(places: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Return the items, of `count`, at these places of the order drawn by `key`, int64 like `places`.

    The order is a permutation of 0, ..., count - 1. Time and memory grow only with the size of `places`.
    """
    half = np.uint64(max(1, -(-max(count - 1, 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.default_rng(key).integers(0, 2**64, TURNS, dtype=np.uint64)
    numbers = np.array(places, np.uint64)
    outside = np.ones(numbers.shape, bool)
    while outside.any():
        left, right = numbers[outside] >> half, numbers[outside] & low
        for turn in keys:
            left, right = right, left ^ (_hash(right + turn) & low)
        numbers[outside] = left << half | right
        outside = numbers >= np.uint64(count)
    return numbers.astype(np.int64)


def _hash(x: np.ndarray) -> np.ndarray:
    """Return the mixing function of SplitMix64 (Steele et al. 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
