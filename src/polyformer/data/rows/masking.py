"""Masked language modelling: the choice of masked tokens and their replacement, new in every epoch or static.

Beginnings of words and ends of sentences follow from the pieces of a tokenizer. Three marks are in use:
WordPiece writes ## before the continuation of a word, Unigram a lower block before its beginning, byte-level
BPE a sign for the space before a word.

Tokens are masked in units: a token, a whole word, or a run of up to `longest` of these. All functions are
pure in the ids and a generator.

Masked diffusion masks a random share of each text, and weights its tokens:

    by rate    t ~ U(0, 1], each of L tokens is masked with probability t    weight 1 / t
    by count   l ~ U{1 .. L}, l of L tokens are masked                       weight L / l

The weighted sum of -log p over the masked tokens has the same expectation for both: an upper bound of -log p
of the text (Nie et al. 2025, LLaDA, equations 3 and 6). The second varies less.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeInt
from polyformer.data.tokenizers.tokenizer import Tokenizer

_BLOCK, _SPACES = "\u2581", "\u0120\u010a\u010d\u0109"  # space, newline, return and tab as bytes are written
_WORD_END, _GOES_ON = "</w>", "@@"
_ENDS = (".", "!", "?")


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Return [V] bool: whether a token with this id begins a word, as far as the token shows.

    In byte-level BPE and Unigram a punctuation mark belongs to the word before it, as in fairseq; in
    WordPiece it is a word. A special token is always a word. If no piece has a mark, every token is a word.
    """
    from tokenizers.models import WordPiece

    pieces, model = _pieces(tokenizer), tokenizer.backend.model
    special = np.zeros(len(pieces), dtype=bool)
    special[list(tokenizer.special_ids)] = True
    if isinstance(model, WordPiece):
        prefix = model.continuing_subword_prefix
        return special | np.array([not piece.startswith(prefix) for piece in pieces])
    # A letter of some language, or a piece, may look like a mark: the most frequent is the mark.
    begins = {marks: [piece.startswith(tuple(marks)) for piece in pieces] for marks in (_BLOCK, _SPACES)}
    mark = max(begins, key=lambda marks: sum(begins[marks]))
    if sum(piece.endswith((_WORD_END, _GOES_ON)) for piece in pieces) > sum(begins[mark]):
        raise InputError(
            f"tokenizer: its pieces mark where words end ({_WORD_END} or {_GOES_ON}), not where they begin; "
            "choose single tokens, masking.unit='token'"
        )
    return special | np.array(begins[mark]) if any(begins[mark]) else np.ones(len(pieces), dtype=bool)


def sentence_ends(tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of the tokens that end a sentence: their last character is . ! or ?"""
    pieces = [piece.removesuffix(_WORD_END) for piece in _pieces(tokenizer)]
    ends = [number for number, piece in enumerate(pieces) if piece.endswith(_ENDS)]
    ends_of_words = np.setdiff1d(np.array(ends, dtype=np.int64), list(tokenizer.special_ids))
    if not len(ends_of_words):
        raise InputError(f"tokenizer: none of its tokens ends in {' '.join(_ENDS)}, which end sentences")
    return ends_of_words


def _pieces(tokenizer: Tokenizer) -> list[str]:
    """Return the vocabulary entry of every id."""
    pieces = [""] * len(tokenizer)
    for piece, number in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        pieces[number] = piece
    return pieces


IGNORED = -100


def mask_tokens(
    ids: np.ndarray,
    generator: np.random.Generator,
    *,
    mask_id: int,
    ordinary_ids: np.ndarray,
    share: float = 0.15,
    random_share: float = 0.1,
    kept_share: float = 0.1,
    starts: np.ndarray | None = None,
    longest: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Return `(input_ids, labels)`, both with the shape of `ids` [T].

    `share` of the tokens among `ordinary_ids` are chosen (rounded, at least one if there is any); special
    tokens, which are not among them, are never chosen. Of the chosen, independently, `random_share` become a
    random ordinary token, `kept_share` stay, the others become `mask_id`. `labels` are the original ids of
    chosen tokens and -100 elsewhere. A generator seeded by the row gives static masking, by row and epoch
    dynamic masking.

    With `starts` [V], which marks ids that begin a word, whole words are chosen. With `longest` above 1, runs
    of n neighbouring words (or tokens, without `starts`) are chosen, n <= longest with probability (1/n) /
    (1/1 + ... + 1/longest); a run that would overlap another run, or exceed the share, is tried shorter. A
    word longer than the rest of the share is not chosen, so that there may be fewer tokens, or none.

    Source: BERT (Devlin et al. 2019), section 3.1 and appendix A.1, for whole words its repository's notes of
    May 2019; dynamic: RoBERTa (Liu et al. 2019), section 4.1; runs: ALBERT (Lan et al. 2020), section 4.1.
    """
    check_masking(share, random_share, kept_share, longest)
    ids = np.asarray(ids)
    candidates = np.flatnonzero(np.isin(ids, ordinary_ids))
    count = min(len(candidates), max(1, round(share * len(candidates))))
    if starts is None and longest == 1:
        chosen = generator.permutation(candidates)[:count]
    else:
        edges = word_edges(ids, candidates, starts)
        runs = draw_runs(candidates, edges, count, longest, generator)
        chosen = np.concatenate([candidates[:0], *(candidates[edges[i] : edges[i + n]] for i, n in runs)])
    fate = generator.random(len(chosen))
    randomised = fate < random_share
    masked = fate >= random_share + kept_share
    corrupted = ids.copy()
    corrupted[chosen[masked]] = mask_id
    corrupted[chosen[randomised]] = generator.choice(ordinary_ids, int(randomised.sum()))
    labels = np.full_like(ids, IGNORED)
    labels[chosen] = ids[chosen]
    return corrupted, labels


def check_masking(share: float, random_share: float, kept_share: float, longest: int) -> None:
    """Raise `InputError` for invalid shares and for runs without units."""
    if not 0 < share <= 1:
        raise InputError(f"share: expected a share of the tokens in (0, 1], got {share}")
    if random_share < 0 or kept_share < 0 or random_share + kept_share > 1:
        raise InputError(
            f"random_share, kept_share: expected a sum of at most 1, got {random_share} and {kept_share}"
        )
    if longest < 1:
        raise InputError(f"longest: expected 1 unit or more, got {longest}")


def word_edges(ids: np.ndarray, candidates: np.ndarray, starts: np.ndarray | None) -> np.ndarray:
    """Return edges so that word i of the text is `candidates[edges[i] : edges[i + 1]]`.

    Without `starts` every token is a word. A word also begins at the first token and after tokens that are no
    candidates.
    """
    begins = np.ones(len(candidates), dtype=bool)
    if starts is not None:
        begins[1:] = starts[ids[candidates[1:]]] | (np.diff(candidates) > 1)
    return np.append(np.flatnonzero(begins), len(candidates))


def draw_runs(
    candidates: np.ndarray, edges: np.ndarray, count: int, longest: int, generator: np.random.Generator
) -> list[tuple[int, int]]:
    """Return runs `(first word, words)` in the order drawn, of at most `count` tokens in total."""
    words = len(edges) - 1
    weights = 1 / np.arange(1, longest + 1)
    lengths = generator.choice(np.arange(1, longest + 1), words, p=weights / weights.sum())
    taken = np.zeros(words, dtype=bool)
    runs: list[tuple[int, int]] = []
    for first, wanted in zip(generator.permutation(words).tolist(), lengths.tolist()):
        if not count:
            break
        for n in range(min(wanted, words - first), 0, -1):
            start, stop = edges[first], edges[first + n]
            unbroken = candidates[stop - 1] - candidates[start] == stop - 1 - start
            if stop - start <= count and unbroken and not taken[first : first + n].any():
                taken[first : first + n] = True
                count -= int(stop - start)
                runs.append((first, n))
                break
    return runs


class MaskedText(NamedTuple):
    """A text with masked tokens, [T] each: labels are -100 and weights 0 at tokens that are never masked."""

    input_ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


def mask_by_rate(
    ids: np.ndarray, texts: np.ndarray, generator: np.random.Generator, mask_id: int, least: float = 0.0
) -> MaskedText:
    """Mask the tokens of each text with one probability t per text, uniform in (least, 1].

    ids: [T]. texts: [T], the number of each token's text, from 0; -1 for a token that is never masked. least:
    a number above 0 limits the weights 1 / t, because their sum has an infinite variance otherwise; it leaves
    out the contribution of lower rates.

    Source: Nie et al. 2025, algorithm 1; its released code has a `least` of 0.001.
    """
    rates = 1 - (1 - least) * generator.random(int(texts.max(initial=-1)) + 1)
    draws = generator.random(len(ids))
    return _masked(ids, texts, mask_id, draws < rates[texts] if len(rates) else texts >= 0, 1 / rates)


def mask_by_count(
    ids: np.ndarray, texts: np.ndarray, generator: np.random.Generator, mask_id: int
) -> MaskedText:
    """Mask l tokens of each text of L tokens, l uniform in 1 .. L; arguments as in `mask_by_rate`.

    Source: Nie et al. 2025, equation 6 and algorithm 3.
    """
    sizes = np.bincount(texts[texts >= 0])
    counts = generator.integers(1, sizes, endpoint=True) if len(sizes) else sizes
    # Tokens in random order within their text; -1 comes first.
    order = np.lexsort((generator.random(len(ids)), texts))
    starts = np.concatenate([[0], np.cumsum(sizes)]) + int((texts < 0).sum())
    places = np.empty(len(ids), np.int64)
    places[order] = np.arange(len(ids))
    chosen = places - starts[texts] < np.append(counts, 0)[texts]
    return _masked(ids, texts, mask_id, chosen, sizes / counts)


def _masked(
    ids: np.ndarray, texts: np.ndarray, mask_id: int, chosen: np.ndarray, weights: np.ndarray
) -> MaskedText:
    """Return the text with the `chosen` tokens masked; weights: one for each text."""
    chosen = chosen & (texts >= 0)
    return MaskedText(
        np.where(chosen, mask_id, ids),
        np.where(chosen, ids, IGNORED),
        np.where(texts >= 0, np.append(weights, 0.0)[texts], 0.0),
    )


Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskingConfig(Config):
    """Options of masked language modelling: see `mask_tokens`.

    The defaults are BERT's, with RoBERTa's dynamic masks. Whole words: unit="word"; ALBERT's n-grams:
    unit="word", longest=3; BERT's static masks: static_copies=10.
    """

    share: float = 0.15  # of the tokens in a row
    random_share: float = 0.1  # share of these replaced by a random token
    kept_share: float = 0.1  # share of these left unchanged
    unit: Literal["token", "word"] = "token"  # masked as a whole
    longest: int = 1  # most consecutive units that may be masked together
    static_copies: NonNegativeInt = 0  # masks per row, all of them in every epoch; 0: always new masks

    def __post_init__(self) -> None:
        check_masking(self.share, self.random_share, self.kept_share, self.longest)


class Masking:
    """Masking of rows: `copies` prepares rows, and `corrupt` masks tokens of a row.

    Static masks, BERT's as described by Liu et al. 2019, section 4.1: each row occurs `static_copies` times,
    and each copy has its own mask, a function of its ids. Forty epochs over rows masked in ten ways are four
    epochs over the copies.
    """

    def __init__(self, config: MaskingConfig, tokenizer: Tokenizer, mask_id: int):
        self.config, self.mask_id, self.ordinary_ids = config, mask_id, tokenizer.ordinary_ids
        self.starts = word_starts(tokenizer) if config.unit == "word" else None

    def copies(self, rows: Sequence[Row]) -> list[Row]:
        """Return every row once per static mask."""
        if not self.config.static_copies:
            return list(rows)
        return [{**row, "copy": copy} for copy in range(self.config.static_copies) for row in rows]

    def corrupt(self, row: Row, generator: np.random.Generator) -> Row:
        """Return `row` with corrupted `input_ids` and with `labels`; static copies ignore `generator`."""
        rest = dict(row)
        copy, ids = rest.pop("copy", None), np.asarray(row["input_ids"])
        if copy is not None:
            generator = np.random.default_rng([copy, zlib.crc32(ids.astype(np.int64).tobytes())])
        config = self.config
        corrupted, labels = mask_tokens(
            ids,
            generator,
            mask_id=self.mask_id,
            ordinary_ids=self.ordinary_ids,
            share=config.share,
            random_share=config.random_share,
            kept_share=config.kept_share,
            starts=self.starts,
            longest=config.longest,
        )
        return {**rest, "input_ids": corrupted, "labels": labels}
