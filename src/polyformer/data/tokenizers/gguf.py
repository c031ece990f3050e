"""The tokenizer in a GGUF file as a pipeline of the `tokenizers` library.

Two kinds are supported: byte-level BPE ("gpt2"), where `tokenizer.ggml.pre` names the pre-tokenization, and
SentencePiece's BPE ("llama"), with merges derived from the scores. The pre-tokenizations are from llama.cpp's
llama-vocab.cpp; texts are normalized if the checkpoint's own tokenizer does so (NFC for Qwen2).
"""

from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from polyformer.core.errors import InputError, quote
from polyformer.core.foreign_checkpoints import Gguf, read_gguf
from polyformer.data.chat.files import of_gguf
from polyformer.data.tokenizers.pipelines import reading
from polyformer.data.tokenizers.sentencepiece import (
    BYTE,
    NORMAL,
    UNKNOWN,
    Pieces,
    with_listed,
    without_symbols,
)
from polyformer.data.tokenizers.tokenizer import Tokenizer

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
