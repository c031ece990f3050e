"""T5's span corruption: spans are taken out of a text, and are what is to be written.

    text     a b c d e f g h i j            spans  c d, h, j
    input    a b <0> e f g <1> i <2> <eos>
    target   <0> c d <1> h <2> j <eos>      a sentinel each, in the order of the text

Pure functions of the ids and the generator. Source: Raffel et al. 2020, sections 3.1.4 and 3.3.4, and how
the released code draws spans: text and spans alternate, from text to a span. (The paper's figure 2 has text
behind the last span, and then one more sentinel ends the target.)
"""

from collections.abc import Sequence

import numpy as np

from polyformer.core.errors import InputError


def span_counts(length: int, density: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """How many of `length` tokens are taken out, and in how many spans: the same for every text."""
    if not 0 < density < 1:
        raise InputError(f"density: expected a share of the tokens in (0, 1), got {density}")
    if mean_span < 1:
        raise InputError(f"mean_span: expected 1 token or more, got {mean_span}")
    if length < 2:
        raise InputError(f"length: expected 2 tokens or more, one to keep and one to take, got {length}")
    taken = min(max(round(length * density), 1), length - 1)
    return taken, min(max(round(taken / mean_span), 1), taken, length - taken)


def draw_spans(
    length: int, generator: np.random.Generator, *, density: float = 0.15, mean_span: float = 3.0
) -> np.ndarray:
    """[length] bool, True where a token is taken; every arrangement of these spans is as likely."""
    taken, spans = span_counts(length, density, mean_span)
    kept = random_segments(length - taken, spans, generator)
    gone = random_segments(taken, spans, generator)
    lengths = np.stack([kept, gone], 1).reshape(-1)
    return np.repeat(np.arange(2 * spans) % 2 == 1, lengths)


def random_segments(items: int, segments: int, generator: np.random.Generator) -> np.ndarray:
    """[segments] lengths of 1 or more that add up to `items`; every way is as likely."""
    cuts = np.sort(generator.choice(items - 1, segments - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [items]]))


def corrupt_spans(
    ids: Sequence[int] | np.ndarray,
    generator: np.random.Generator,
    *,
    sentinel_ids: Sequence[int],
    eos_id: int,
    density: float = 0.15,
    mean_span: float = 3.0,
) -> tuple[np.ndarray, np.ndarray]:
    """`(input_ids, labels)` of the text `ids` [T]. `sentinel_ids`: <0>, <1>, ..., one for each span."""
    ids = np.asarray(ids)
    taken = draw_spans(len(ids), generator, density=density, mean_span=mean_span)
    _, spans = span_counts(len(ids), density, mean_span)
    if len(sentinel_ids) < spans:
        raise InputError(
            f"sentinel_ids: expected {spans} or more for a text of {len(ids)} tokens, got {len(sentinel_ids)}"
        )
    sentinels = np.asarray(sentinel_ids[:spans], ids.dtype)
    first = np.flatnonzero(taken & ~np.append(False, taken[:-1]))  # of every span
    # A sentinel takes the place of its span in the input, and stands before the span in the target.
    marked = np.insert(ids, first, sentinels)
    stays, goes = np.insert(~taken, first, True), np.insert(taken, first, True)
    return np.append(marked[stays], eos_id), np.append(marked[goes], eos_id)


def corrupted_lengths(length: int, density: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """The lengths of input and target, <eos> included, of a text of `length` tokens."""
    taken, spans = span_counts(length, density, mean_span)
    return length - taken + spans + 1, taken + spans + 1


def text_length(input_length: int, density: float = 0.15, mean_span: float = 3.0) -> int:
    """The longest text whose input has at most `input_length` tokens: cut so, rows need no padding.

    Raffel et al. 2020, section 3.3.4: for 512 tokens 568, whose targets have 114.
    """
    if input_length < 3:
        raise InputError(f"input_length: expected 3 tokens or more, got {input_length}")
    length = input_length - 1
    while corrupted_lengths(length + 1, density, mean_span)[0] <= input_length:
        length += 1
    return length
