"""Beginnings of words and ends of sentences, derived from the pieces of a tokenizer.

Three marks are in use: WordPiece writes ## before the continuation of a word, Unigram a lower block before
its beginning, byte-level BPE a sign for the space before a word.
"""

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.tokenizer import Tokenizer

_BLOCK, _SPACES = "\u2581", "\u0120\u010a\u010d\u0109"  # space, newline, return and tab as bytes are written
_WORD_END, _GOES_ON = "</w>", "@@"
_ENDS = (".", "!", "?")


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Return [V] bool: whether a token with this id begins a word, as far as the token shows.

    In byte-level BPE and Unigram a punctuation mark belongs to the word before it, as in fairseq; in
    WordPiece it is a word. A special token is always a word. If no piece has a mark, every token is a word.
    """
    pieces, model = _pieces(tokenizer), tokenizer.backend.model
    special = np.zeros(len(pieces), dtype=bool)
    special[list(tokenizer.special_ids)] = True
    if type(model).__name__ == "WordPiece":
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
