"""BART's five kinds of noise; the model learns to reconstruct the original text.

    text               A B C . D E .
    mask_some          A _ C . D _ .        a mask per token
    delete_some        A C . D .            the model must find the missing positions
    infill             A _ D _ E .          a mask per span of any length, including 0
    permute_sentences  D E . A B C .
    rotate             C . D E . A B        starts at any token

All functions are pure in the ids, without special tokens around them, and the generator. Source: Lewis et al.
2020, section 2.2; the best is infilling of 30 % with permuted sentences, section 5.1. `apply_noises` combines
the noises.
"""

import dataclasses
from typing import Annotated

import numpy as np
from annotated_types import Gt, Interval

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveFloat, Wording, check_range

BELOW_ONE, OF_TOKENS = Interval(ge=0, lt=1), Wording("a share of the tokens")
TokenShare = Annotated[float, BELOW_ONE, OF_TOKENS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseConfig(Config):
    """Noises of a text, in the order of application. The defaults are BART's."""

    permute: bool = True  # put the sentences in random order
    rotate: bool = False  # rotate the text to begin at a random token
    delete: TokenShare = 0.0  # share of the tokens
    infill: TokenShare = 0.3  # share of the tokens in masked spans, one mask per span
    mean_span: PositiveFloat = 3.0  # mean of the Poisson distribution of span lengths
    mask: TokenShare = 0.0  # share of the tokens


def apply_noises(
    ids: np.ndarray,
    generator: np.random.Generator,
    config: NoiseConfig,
    *,
    mask_id: int,
    end_ids: np.ndarray | None = None,
) -> np.ndarray:
    """Return `ids` [T] with every noise of `config`; `permute` requires `end_ids`, which end sentences."""
    if config.permute:
        if end_ids is None:
            raise InputError("end_ids: expected the tokens that end sentences, which permute=True moves")
        ids = permute_sentences(ids, generator, end_ids=end_ids)
    if config.rotate:
        ids = rotate(ids, generator)
    if config.delete:
        ids = delete_some(ids, generator, share=config.delete)
    if config.infill:
        ids = infill(ids, generator, mask_id=mask_id, share=config.infill, mean_span=config.mean_span)
    if config.mask:
        ids = mask_some(ids, generator, mask_id=mask_id, share=config.mask)
    return ids


def mask_some(
    ids: np.ndarray, generator: np.random.Generator, *, mask_id: int, share: float = 0.15
) -> np.ndarray:
    """Replace `share` of the tokens (rounded) by `mask_id`."""
    corrupted = np.array(ids)
    corrupted[_some(corrupted, generator, share)] = mask_id
    return corrupted


def delete_some(ids: np.ndarray, generator: np.random.Generator, *, share: float = 0.15) -> np.ndarray:
    """Delete `share` of the tokens (rounded)."""
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
    """Replace spans, `share` of the tokens in total (rounded), by one `mask_id` each.

    Lengths are Poisson distributed until they reach the share; the last is truncated to it. A span of length
    0 inserts a mask between two tokens. All orders of spans and remaining tokens are equally likely.
    """
    check_range("share", share, BELOW_ONE, OF_TOKENS)
    check_range("mean_span", mean_span, Gt(0))
    ids = np.asarray(ids)
    hidden = round(share * len(ids))
    lengths = draw_lengths(hidden, mean_span, generator)
    # Place spans among the remaining tokens (length 1 each) in random order, then map them to the text.
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
    """Return Poisson distributed lengths with the sum `total`, the last truncated; none for 0."""
    lengths: list[int] = []
    while total > 0:
        length = min(int(generator.poisson(mean)), total)
        lengths.append(length)
        total -= length
    return np.array(lengths, dtype=np.int64)


def permute_sentences(ids: np.ndarray, generator: np.random.Generator, *, end_ids: np.ndarray) -> np.ndarray:
    """Return the sentences in random order; a sentence ends after a run of `end_ids`, or with the text."""
    ids = np.asarray(ids)
    ends = np.isin(ids, end_ids)
    cuts = np.flatnonzero(ends[:-1] & ~ends[1:]) + 1
    sentences = np.split(ids, cuts)
    return np.concatenate([sentences[i] for i in generator.permutation(len(sentences))])


def rotate(ids: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the text from a random token on, followed by the tokens before it; all are equally likely."""
    ids = np.asarray(ids)
    return np.roll(ids, -int(generator.integers(len(ids)))) if len(ids) else ids


def _some(ids: np.ndarray, generator: np.random.Generator, share: float) -> np.ndarray:
    """Return random positions of `share` of the tokens."""
    check_range("share", share, BELOW_ONE, OF_TOKENS)
    return generator.permutation(len(ids))[: round(share * len(ids))]
