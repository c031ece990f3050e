"""T5's span corruption: spans are removed from a text and become the target.

    text     a b c d e f g h i j            spans  c d, h, j
    input    a b <0> e f g <1> i <2> <eos>
    target   <0> c d <1> h <2> j <eos>      a sentinel each, in the order of the text

All functions are pure in the ids and the generator. Source: Raffel et al. 2020, sections 3.1.4 and 3.3.4,
with the span sampling of the released code: text and spans alternate, beginning with text and ending with a
span. (In the paper's figure 2, text follows the last span, and then an additional sentinel ends the target.)
"""

from collections.abc import Sequence

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.tokenizer import Tokenizer

SENTINELS = 100  # as in T5, or more if rows need them


def span_counts(length: int, density: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """Return the number of tokens to remove from `length` tokens and the number of spans, for every text."""
    if not 0 < density < 1:
        raise InputError(f"density: expected a share of the tokens in (0, 1), got {density}")
    if mean_span < 1:
        raise InputError(f"mean_span: expected 1 token or more, got {mean_span}")
    if length < 2:
        raise InputError(f"length: expected 2 tokens or more, one to keep and one to replace, got {length}")
    taken = min(max(round(length * density), 1), length - 1)
    return taken, min(max(round(taken / mean_span), 1), taken, length - taken)


def draw_spans(
    length: int, generator: np.random.Generator, *, density: float = 0.15, mean_span: float = 3.0
) -> np.ndarray:
    """Return [length] bool, True for removed tokens; every arrangement of the spans is equally likely."""
    taken, spans = span_counts(length, density, mean_span)
    kept = random_segments(length - taken, spans, generator)
    gone = random_segments(taken, spans, generator)
    lengths = np.stack([kept, gone], 1).reshape(-1)
    return np.repeat(np.arange(2 * spans) % 2 == 1, lengths)


def random_segments(items: int, segments: int, generator: np.random.Generator) -> np.ndarray:
    """Return [segments] lengths of 1 or more with the sum `items`; every split is equally likely."""
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
    """Return `(input_ids, labels)` of the text `ids` [T]. `sentinel_ids`: <0>, <1>, ..., one per span."""
    ids = np.asarray(ids)
    taken = draw_spans(len(ids), generator, density=density, mean_span=mean_span)
    _, spans = span_counts(len(ids), density, mean_span)
    if len(sentinel_ids) < spans:
        raise InputError(
            f"sentinel_ids: expected {spans} or more for a text of {len(ids)} tokens, got {len(sentinel_ids)}"
        )
    sentinels = np.asarray(sentinel_ids[:spans], ids.dtype)
    first = np.flatnonzero(taken & ~np.append(False, taken[:-1]))  # for every span
    # A sentinel replaces its span in the input, and precedes the span in the target.
    marked = np.insert(ids, first, sentinels)
    stays, goes = np.insert(~taken, first, True), np.insert(taken, first, True)
    return np.append(marked[stays], eos_id), np.append(marked[goes], eos_id)


def corrupted_lengths(length: int, density: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """Return the lengths of input and target, including <eos>, for a text of `length` tokens."""
    taken, spans = span_counts(length, density, mean_span)
    return length - taken + spans + 1, taken + spans + 1


def text_length(input_length: int, density: float = 0.15, mean_span: float = 3.0) -> int:
    """Return the longest text length with at most `input_length` input tokens, so that rows need no padding.

    Raffel et al. 2020, section 3.3.4: for 512 tokens 568, with targets of 114.
    """
    if input_length < 3:
        raise InputError(f"input_length: expected 3 tokens or more, got {input_length}")
    length = input_length - 1
    while corrupted_lengths(length + 1, density, mean_span)[0] <= input_length:
        length += 1
    return length


NAME = "<extra_id_{}>"
"""Sentinel tokens; as in T5's vocabulary they follow all other tokens, the first with the highest id."""


def add_sentinels(tokenizer: Tokenizer, count: int = 100) -> Tokenizer:
    """Return a tokenizer with at least `count` sentinels: `tokenizer` itself if it has them."""
    backend = tokenizer.backend
    missing = [name for name in map(NAME.format, range(count)) if backend.token_to_id(name) is None]
    if not missing:
        return tokenizer
    from polyformer.data.pipelines import from_json, with_special

    copy = from_json(backend.to_str())
    return Tokenizer(with_special(copy, reversed(missing)), tokenizer.roles)


def sentinel_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """Return the ids of the first `count` sentinels, in order; raises `InputError` if there are fewer."""
    numbers = [tokenizer.backend.token_to_id(NAME.format(number)) for number in range(count)]
    ids = [number for number in numbers if number is not None]
    if len(ids) < count:
        raise InputError(
            f"tokenizer: expected {count} sentinels {NAME.format(0)}, {NAME.format(1)}, ..., got {len(ids)}; "
            "cut shorter rows, or train a tokenizer for this task; a checkpoint that has too few was not "
            "trained on spans: leave such parts out (form: spans)"
        )
    return ids


def pieces(documents: Sequence[Sequence[int]], length: int) -> list[np.ndarray]:
    """Return the concatenated documents in pieces of `length` tokens, without a last piece of one token."""
    ids = np.array([token for document in documents for token in document], np.int32)
    texts = [ids[start : start + length] for start in range(0, len(ids), length)]
    return [text for text in texts if len(text) > 1]
