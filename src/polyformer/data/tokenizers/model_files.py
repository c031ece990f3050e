"""Tokenizers in .model files (SentencePiece) and .gguf files, as pipelines of the `tokenizers` library.

A .model file (Unigram, BPE, characters) is a protocol buffer: the pieces with their scores and types, the
trainer's settings, and the table for the normalization of characters. Its schema is part of the
`sentencepiece` package. The ids are computed by `tokenizers`, in parallel, and saved as tokenizer.json,
without that package. SentencePiece's removal of extra spaces and its dummy prefix become a normalizer and
`Metaspace`. A text is split into words unless a piece crosses words (`split_by_whitespace=false`, or spaces
as suffixes). The user's symbols are split from the rest of the text, the longest at each place first; Unigram
has scores of them.

A .gguf file has SentencePiece's BPE ("llama"), with merges derived from the scores, or byte-level BPE
("gpt2"), where `tokenizer.ggml.pre` names the pre-tokenization. The pre-tokenizations are from llama.cpp's
llama-vocab.cpp; texts are normalized if the checkpoint's own tokenizer does so (NFC for Qwen2).

Kudo, Richardson: SentencePiece, a simple and language independent subword tokenizer, EMNLP 2018.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from polyformer.core.errors import InputError, quote
from polyformer.core.foreign_checkpoints import Gguf, read_gguf
from polyformer.core.imports import needs_extra
from polyformer.data.chat import of_gguf
from polyformer.data.tokenizers.pipelines import reading, split_names, then, with_special
from polyformer.data.tokenizers.tokenizer import Tokenizer

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


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenization(NamedTuple):
    """The pre-tokenization of a text before bytes are merged.

    patterns: each splits the pieces of the previous pattern. whole: whether a piece that is a token is used
    without merges. nfc: whether the text is normalized. bos: whether a text begins with <bos> if the file
    does not specify it.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    nfc: bool = False
    bos: bool = False


_DIGITS = PreTokenization((r"\p{N}", GPT2))
_LLAMA3 = PreTokenization((LLAMA3,), whole=True, bos=True)
_QWEN2 = PreTokenization((QWEN2,), nfc=True)
SPLITS = {
    "default": PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt"), PreTokenization((GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": PreTokenization((TEKKEN,), whole=True),
}
"""Pre-tokenizations by their names in GGUF files."""

ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "cls": "cls"}
ROLES |= {"mask": "mask"}
"""Our roles of special tokens, and their GGUF names with their misspelling."""


def load_gguf(path: Path) -> Tokenizer:
    """Load the tokenizer in `path`; raises `InputError` if it is of another kind or damaged."""
    file = read_gguf(path)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise InputError(
            f"{path}: tokenizer.ggml.model is {quote(kind)}, and only gpt2 and llama are supported; give the "
            "tokenizer of the model that the file was made from"
        )
    tokens, kinds = _listed(file, "tokens", str), _listed(file, "token_type", int)
    kinds = kinds or [NORMAL] * len(tokens)
    if not tokens or len(kinds) != len(tokens) or len({*tokens}) < len(tokens):
        raise InputError(
            f"{path}: damaged: {len(tokens)} tokens, {len({*tokens})} of them different, {len(kinds)} kinds; "
            "get another copy of it"
        )
    with reading(path):
        splits = _pre_tokenization(file) if kind == "gpt2" else None
        backend = _pieces(file, tokens, kinds) if splits is None else _bytes(file, splits, tokens, kinds)
        roles = {role: _named(file, name, tokens) for role, name in ROLES.items()}
        _mark(file, backend, roles, bos=True if splits is None else splits.bos)
        tokenizer = Tokenizer(backend, roles=roles)
    tokenizer.chat = of_gguf(file, roles)
    return tokenizer


def _listed(file: Gguf, name: str, kind: type) -> list[Any]:
    values = file.value(f"tokenizer.ggml.{name}", list, [])
    if not all(type(value) is kind for value in values):
        raise InputError(f"{file.path}: damaged: expected a list of {kind.__name__} as tokenizer.ggml.{name}")
    return values


def _pre_tokenization(file: Gguf) -> PreTokenization:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise InputError(
            f"{file.path}: tokenizer.ggml.pre is {quote(name)}, and only {', '.join(SPLITS)} are supported; "
            "give the tokenizer of the model that the file was made from"
        )
    return SPLITS[name]


def _bytes(file: Gguf, splits: PreTokenization, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    """Build the pipeline of byte-level BPE."""
    pairs = [tuple(merge.split(" ", 1)) for merge in _listed(file, "merges", str)]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=splits.whole))
    if splits.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return with_listed(backend, tokens, kinds)


def _pieces(file: Gguf, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    """Build the pipeline of SentencePiece's BPE."""
    scores = [float(score) for score in file.value("tokenizer.ggml.scores", list, [])]
    if len(scores) != len(tokens) or UNKNOWN not in kinds:
        raise InputError(
            f"{file.path}: damaged: {len(scores)} scores of {len(tokens)} pieces, {kinds.count(UNKNOWN)} "
            "unknown ones; get another copy of it"
        )
    pieces = Pieces(
        names=tokens,
        scores=scores,
        kinds=kinds,
        is_bpe=True,
        characters=b"",
        bytes_for_unknown=BYTE in kinds,
        tidy_spaces=file.value("tokenizer.ggml.remove_extra_whitespaces", bool, False),
        prefix=file.value("tokenizer.ggml.add_space_prefix", bool, True),
    )
    return with_listed(without_symbols(pieces), tokens, kinds)


def _named(file: Gguf, name: str, tokens: list[str]) -> str | None:
    """Return the token of a role; None if the file does not define it."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    number = file.value(key, int)
    if not 0 <= number < len(tokens):
        raise InputError(f"{file.path}: {key} is {number}, expected 0 to {len(tokens) - 1}")
    return tokens[number]


def _mark(file: Gguf, backend: tokenizers.Tokenizer, roles: dict[str, str | None], bos: bool) -> None:
    """Add the special tokens that the file requests when encoding for a model."""
    begin = roles["bos"] if file.value("tokenizer.ggml.add_bos_token", bool, bos) else None
    end = roles["eos"] if file.value("tokenizer.ggml.add_eos_token", bool, False) else None
    if begin is None and end is None:
        return
    single = [*([begin] if begin else []), "$A", *([end] if end else [])]
    pair = [*single, *(("$B" if part == "$A" else part) + ":1" for part in single)]
    ids = [(name, backend.token_to_id(name)) for name in {*single} - {"$A"}]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
