"""Noise of texts for sequence-to-sequence training: BART's five kinds, and T5's spans.

BART's model learns to reconstruct the original text of five kinds of noise:

    text               A B C . D E .
    mask_some          A _ C . D _ .        a mask per token
    delete_some        A C . D .            the model must find the missing positions
    infill             A _ D _ E .          a mask per span of any length, including 0
    permute_sentences  D E . A B C .
    rotate             C . D E . A B        starts at any token

All functions are pure in the ids, without special tokens around them, and the generator. Lewis et al. 2020,
section 2.2; the best is infilling of 30 % with permuted sentences, section 5.1. `apply_noises` combines the
noises.

In T5's span corruption, spans are removed from a text and become the target:

    text     a b c d e f g h i j            spans  c d, h, j
    input    a b <0> e f g <1> i <2> <eos>
    target   <0> c d <1> h <2> j <eos>      a sentinel each, in the order of the text

Raffel et al. 2020, sections 3.1.4 and 3.3.4, with the span sampling of the released code: text and spans
alternate, beginning with text and ending with a span. (In the paper's figure 2, text follows the last span,
and then an additional sentinel ends the target.)
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from annotated_types import Gt, Interval

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveFloat, Wording, check_range
from polyformer.data.tokenizers.tokenizer import Tokenizer

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
    from polyformer.data.tokenizers.pipelines import from_json, with_special

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
