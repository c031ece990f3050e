"""BART's five kinds of noise; the model learns to reconstruct the text that it corrupts.

    text               A B C . D E .
    mask_some          A _ C . D _ .        a token for a token
    delete_some        A C . D .            where something is missing is to be found out
    infill             A _ D _ E .          a span of any length, also of none, is one mask
    permute_sentences  D E . A B C .
    rotate             C . D E . A B        starts at any token

Pure functions of the ids, without special tokens around them, and the generator.
Source: Lewis et al. 2020, section 2.2.
"""

import numpy as np

from polyformer.core.errors import InputError


def mask_some(
    ids: np.ndarray, generator: np.random.Generator, *, mask_id: int, share: float = 0.15
) -> np.ndarray:
    """`share` of the tokens (rounded) become `mask_id`."""
    corrupted = np.array(ids)
    corrupted[_some(corrupted, generator, share)] = mask_id
    return corrupted


def delete_some(ids: np.ndarray, generator: np.random.Generator, *, share: float = 0.15) -> np.ndarray:
    """`share` of the tokens (rounded) are left out."""
    ids = np.asarray(ids)
    return np.delete(ids, _some(ids, generator, share))


def infill(
    ids: np.ndarray,
    generator: np.random.Generator,
    *,
    mask_id: int,
    share: float = 0.3,
    mean_span: float = 3.0,
) -> np.ndarray:
    """Spans of `share` of the tokens together (rounded) become one `mask_id` each.

    Lengths are drawn by Poisson's law until they reach the share; the last is cut to it. A span of length 0
    puts a mask between two tokens. Spans and the tokens that stay come in every order with equal chance.
    """
    check_share("share", share)
    check_mean(mean_span)
    ids = np.asarray(ids)
    hidden = round(share * len(ids))
    lengths = draw_lengths(hidden, mean_span, generator)
    # A row of tokens that stay (1 long) and of spans: draw which is which, then lay it over the text.
    sizes = np.ones(len(ids) - hidden + len(lengths), dtype=np.int64)
    places = generator.permutation(len(sizes))[: len(lengths)]
    sizes[places] = lengths
    is_span = np.zeros(len(sizes), dtype=bool)
    is_span[places] = True
    begins = np.cumsum(sizes) - sizes
    corrupted = np.full(len(is_span), mask_id, ids.dtype)
    corrupted[~is_span] = ids[begins[~is_span]]
    return corrupted


def draw_lengths(total: int, mean: float, generator: np.random.Generator) -> np.ndarray:
    """Lengths by Poisson's law that add up to `total`, the last one cut; none for 0."""
    lengths: list[int] = []
    while total > 0:
        length = min(int(generator.poisson(mean)), total)
        lengths.append(length)
        total -= length
    return np.array(lengths, dtype=np.int64)


def permute_sentences(ids: np.ndarray, generator: np.random.Generator, *, end_ids: np.ndarray) -> np.ndarray:
    """The sentences in random order; one ends with the last of a run of `end_ids`, or with the text."""
    ids = np.asarray(ids)
    ends = np.isin(ids, end_ids)
    cuts = np.flatnonzero(ends[:-1] & ~ends[1:]) + 1
    sentences = np.split(ids, cuts)
    return np.concatenate([sentences[i] for i in generator.permutation(len(sentences))])


def rotate(ids: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The text from a random token on, and then what stood before it; each token is as likely."""
    ids = np.asarray(ids)
    return np.roll(ids, -int(generator.integers(len(ids)))) if len(ids) else ids


def check_share(name: str, share: float) -> None:
    """Raises `InputError` unless 0 <= share < 1."""
    if not 0 <= share < 1:
        raise InputError(f"{name}: expected a share of the tokens in [0, 1), got {share}")


def check_mean(mean_span: float) -> None:
    """Raises `InputError` unless the mean length of spans is above 0."""
    if not mean_span > 0:
        raise InputError(f"mean_span: expected a mean above 0, got {mean_span}")


def _some(ids: np.ndarray, generator: np.random.Generator, share: float) -> np.ndarray:
    """The places of `share` of the tokens."""
    check_share("share", share)
    return generator.permutation(len(ids))[: round(share * len(ids))]
