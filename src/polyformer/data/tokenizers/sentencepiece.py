"""SentencePiece models (Unigram, BPE, characters) as pipelines of the `tokenizers` library.

A .model file is a protocol buffer: the pieces with their scores and types, the trainer's settings, and the
table for the normalization of characters. Its schema is part of the `sentencepiece` package. The ids are
computed by `tokenizers`, in parallel, and saved as tokenizer.json, without that package. SentencePiece's
removal of extra spaces and its dummy prefix become a normalizer and `Metaspace`. A text is split into words
unless a piece crosses words (`split_by_whitespace=false`, or spaces as suffixes). The user's symbols are
split from the rest of the text, the longest at each place first; Unigram has scores of them.

Kudo, Richardson: SentencePiece, a simple and language independent subword tokenizer, EMNLP 2018.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from polyformer.core.errors import InputError, quote
from polyformer.core.imports import needs_extra
from polyformer.data.tokenizers.pipelines import split_names, then, with_special

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces."""
_UNIGRAM, _BPE, _CHARACTERS = 1, 2, 4


@dataclass(frozen=True)
class Pieces:
    """The content of a model file."""

    names: list[str]
    scores: list[float]
    kinds: list[int]
    is_bpe: bool  # merged by scores; otherwise the most probable pieces
    characters: bytes  # the normalizer's table; may be empty
    bytes_for_unknown: bool
    tidy_spaces: bool  # remove spaces at the ends and double spaces
    prefix: bool  # add a space before the text
    suffix: bool = False  # that space comes after the text, and spaces end pieces
    is_unigram: bool = False  # user-defined symbols are pieces with a score, like others

    def of(self, *kinds: int) -> list[str]:
        """Return the pieces of these types."""
        return [name for name, kind in zip(self.names, self.kinds) if kind in kinds]

    @property
    def cross_words(self) -> bool:
        """Return whether a piece may contain a space after its first character."""
        return any("▁" in name[1:] for name in self.of(NORMAL, USER))


def read_pieces(path: Path) -> Pieces:
    """Read the model in `path`; raises `InputError` if it is no model, or if the package is missing."""
    reason = f"{path}: reading a SentencePiece model needs the packages sentencepiece and protobuf"
    with needs_extra("sentencepiece", reason):
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2 as schema
    model: Any = schema.ModelProto()  # type: ignore[attr-defined]
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise InputError(f"{path}: not a SentencePiece model, or a damaged one ({error})") from error
    if not any(piece.type == UNKNOWN for piece in model.pieces) or not model.HasField("trainer_spec"):
        raise InputError(
            f"{path}: not a SentencePiece model, or a damaged one (no unknown piece, no trainer)"
        )
    algorithm = model.trainer_spec.model_type
    if algorithm not in (_UNIGRAM, _BPE, _CHARACTERS):
        raise InputError(f"{path}: a SentencePiece model of whole words, which is not supported")
    if not model.normalizer_spec.escape_whitespaces or any(piece.type == UNUSED for piece in model.pieces):
        raise InputError(
            f"{path}: a SentencePiece model with unused pieces, or whose pieces have spaces instead of ▁ "
            "(escape_whitespaces=false), which are not supported; use a tokenizer.json of it"
        )
    return Pieces(
        names=[piece.piece for piece in model.pieces],
        scores=[piece.score for piece in model.pieces],
        kinds=[piece.type for piece in model.pieces],
        is_bpe=algorithm == _BPE,
        characters=model.normalizer_spec.precompiled_charsmap,
        bytes_for_unknown=model.trainer_spec.byte_fallback,
        tidy_spaces=model.normalizer_spec.remove_extra_whitespaces,
        prefix=model.normalizer_spec.add_dummy_prefix,
        suffix=model.trainer_spec.treat_whitespace_as_suffix,
        is_unigram=algorithm == _UNIGRAM,
    )


def merges_of(names: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Return the pairs that form each piece, best piece first: SentencePiece merges any such pair."""
    rank = {name: (-score, i) for i, (name, score) in enumerate(zip(names, scores)) if kinds[i] == NORMAL}
    merges: list[tuple[str, str]] = []
    for name in sorted(rank, key=rank.__getitem__):
        pairs = [(name[:i], name[i:]) for i in range(1, len(name))]
        known = [pair for pair in pairs if pair[0] in rank and pair[1] in rank]
        merges += sorted(known, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges


def pipeline(pieces: Pieces) -> tokenizers.Tokenizer:
    """Return the tokenizer of `pieces`; its ids are SentencePiece's own.

    Raises `InputError` for symbols of the user that cannot be found in the normalized text.
    """
    backend = without_symbols(pieces)
    _check_symbols(pieces)
    if pieces.is_bpe and pieces.of(USER):
        _merge_only_parts(backend, pieces)
    elif not pieces.is_bpe:
        split_names(backend, pieces.of(BYTE))  # in a text they are characters
    symbols = sorted(map(re.escape, pieces.of(USER)), key=len, reverse=True)
    if symbols and not pieces.is_unigram:
        then(backend, pre_tokenizers.Split(tokenizers.Regex("|".join(symbols)), behavior="isolated"))
    return backend


def without_symbols(pieces: Pieces) -> tokenizers.Tokenizer:
    """Return the tokenizer of `pieces`, whose BPE does not find the user's symbols."""
    backend = tokenizers.Tokenizer(_model(pieces))
    steps: list[Any] = []
    if pieces.characters:  # the library's table has no separate accents
        steps += [normalizers.NFC(), normalizers.Precompiled(pieces.characters)]
    if pieces.tidy_spaces:
        steps += [
            normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    if pieces.tidy_spaces and not pieces.suffix and not pieces.cross_words:
        _split_words(backend, pieces)
    else:
        _keep_spaces(backend, pieces, steps)
    backend.normalizer = normalizers.Sequence(steps)
    return with_special(backend, pieces.of(CONTROL))


def with_listed(
    backend: tokenizers.Tokenizer, names: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    """Return the pipeline with its control tokens as special tokens, and with the user's tokens.

    The user's tokens are found in the text before it is normalized.
    """
    listed = list(zip(names, kinds))
    control = [name for name, kind in listed if kind == CONTROL and backend.token_to_id(name) is not None]
    with_special(backend, control)
    own = [tokenizers.AddedToken(name, normalized=False) for name, kind in listed if kind == USER]
    backend.add_tokens(own)
    return backend


def _check_symbols(pieces: Pieces) -> None:
    """Raise `InputError` for a symbol that the normalizer changes, from which SentencePiece exempts it."""
    table = [normalizers.Precompiled(pieces.characters)] if pieces.characters else []
    plain = normalizers.Sequence([normalizers.NFC(), *table])
    for symbol in pieces.of(USER):
        if " " in symbol or (table and plain.normalize_str(symbol) != symbol):
            raise InputError(
                f"the user-defined symbol {quote(symbol)} of this SentencePiece model is changed by its own "
                "normalization, which is not supported; use a tokenizer.json of it"
            )


def _merge_only_parts(backend: tokenizers.Tokenizer, pieces: Pieces) -> None:
    """Make every part of a text that is a piece this token without merges, for the user's symbols.

    Raises `InputError` if other parts would have other tokens than by merges.
    """
    merged = backend.model
    lost = [name for name in pieces.of(NORMAL) if len(merged.tokenize(name)) > 1]
    if lost:
        raise InputError(
            f"this SentencePiece model has user-defined symbols and pieces that no merges form, such as "
            f"{quote(lost[0])}, which is not supported; use a tokenizer.json of it"
        )
    merged.ignore_merges = True
    backend.model = merged
    split_names(backend, pieces.of(UNKNOWN, CONTROL, BYTE))


def _split_words(backend: tokenizers.Tokenizer, pieces: Pieces) -> None:
    """Split words, each with the space before it: no piece crosses a word boundary."""
    scheme = "always" if pieces.prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    blank = decoders.Metaspace(prepend_scheme=scheme)
    fallback = decoders.Sequence([decoders.ByteFallback(), blank])
    backend.decoder = fallback if pieces.bytes_for_unknown else blank


def _keep_spaces(backend: tokenizers.Tokenizer, pieces: Pieces, steps: list[Any]) -> None:
    """Keep every space, including the first; a piece may be several spaces, as in Llama's vocabulary.

    Appends to the normalizers in `steps`.
    """
    own: Any = ()  # the removal of the space that is added to a text
    if pieces.prefix and pieces.suffix:  # it is not removed
        steps.append(normalizers.Replace(tokenizers.Regex(r"(?!\A)\z"), "▁"))
    elif pieces.prefix:
        steps.append(normalizers.Prepend("▁"))
        own = [decoders.Strip(" ", 1, 0)]
    steps.append(normalizers.Replace(" ", "▁"))
    blank = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse(), *own])


def _model(pieces: Pieces) -> Any:
    unknown = pieces.kinds.index(UNKNOWN)
    if pieces.is_bpe:
        vocab = {name: i for i, name in enumerate(pieces.names)}
        return models.BPE(
            vocab=vocab,
            merges=merges_of(pieces.names, pieces.scores, pieces.kinds),
            unk_token=pieces.names[unknown],
            fuse_unk=True,
            byte_fallback=pieces.bytes_for_unknown,
        )
    scores = list(zip(pieces.names, pieces.scores))
    return models.Unigram(scores, unknown, pieces.bytes_for_unknown)
