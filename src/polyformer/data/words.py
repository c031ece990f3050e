"""What the pieces of a tokenizer say about the text: where words begin, and where sentences end.

Three marks are in use: WordPiece writes ## before what goes on inside a word, Unigram a lower block before
what begins one, byte-level BPE its own sign for the space that comes before a word.
"""

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.tokenizer import Tokenizer

_BLOCK, _SPACES = "\u2581", "\u0120\u010a\u010d\u0109"  # space, newline, return and tab as bytes are written
_WORD_END, _GOES_ON = "</w>", "@@"
_ENDS = (".", "!", "?")


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """[V] bool: whether a token of this id begins a word, as far as the token shows it.

    In byte-level BPE and Unigram a mark such as a comma belongs to the word before it, as in fairseq; in
    WordPiece it is a word. A special token is always one. Where no piece has any mark every token is a word.
    """
    pieces, model = _pieces(tokenizer), tokenizer.backend.model
    special = np.zeros(len(pieces), dtype=bool)
    special[list(tokenizer.special_ids)] = True
    if type(model).__name__ == "WordPiece":
        prefix = model.continuing_subword_prefix
        return special | np.array([not piece.startswith(prefix) for piece in pieces])
    # A letter of some language, or a piece of its own, may look like a mark: the most frequent one is it.
    begins = {marks: [piece.startswith(tuple(marks)) for piece in pieces] for marks in (_BLOCK, _SPACES)}
    mark = max(begins, key=lambda marks: sum(begins[marks]))
    if sum(piece.endswith((_WORD_END, _GOES_ON)) for piece in pieces) > sum(begins[mark]):
        raise InputError(
            f"tokenizer: its pieces mark where words end ({_WORD_END} or {_GOES_ON}), not where they begin; "
            "choose single tokens, masking.unit='token'"
        )
    return special | np.array(begins[mark]) if any(begins[mark]) else np.ones(len(pieces), dtype=bool)


def sentence_ends(tokenizer: Tokenizer) -> np.ndarray:
    """The ids of the tokens that end a sentence: their last character is . ! or ?"""
    pieces = [piece.removesuffix(_WORD_END) for piece in _pieces(tokenizer)]
    ends = [number for number, piece in enumerate(pieces) if piece.endswith(_ENDS)]
    ends_of_words = np.setdiff1d(np.array(ends, dtype=np.int64), list(tokenizer.special_ids))
    if not len(ends_of_words):
        raise InputError(f"tokenizer: none of its tokens ends in {' '.join(_ENDS)}, which end sentences")
    return ends_of_words


def _pieces(tokenizer: Tokenizer) -> list[str]:
    """The written form of every id."""
    pieces = [""] * len(tokenizer)
    for piece, number in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        pieces[number] = piece
    return pieces
