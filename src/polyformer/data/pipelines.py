"""The pipelines of the `tokenizers` library behind `Tokenizer`: each algorithm's parts, trainer and files."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers

from polyformer.core.errors import InputError
from polyformer.data.special_tokens import BYTES, NAMES, SPECIAL_OF

_NEVER = -1e6  # a log probability below that of any text spelt character by character


def _with_special(backend: tokenizers.Tokenizer, names: Iterable[str]) -> tokenizers.Tokenizer:
    tokens = [tokenizers.AddedToken(name, special=True, normalized=False) for name in names]
    backend.add_special_tokens(tokens)
    return backend


def _bytelevel(model: Any, lowercase: bool, split: bool) -> tokenizers.Tokenizer:
    """The pipeline of byte-level BPE (GPT-2): every byte is a character, so that nothing is unknown."""
    backend = tokenizers.Tokenizer(model)
    if lowercase:
        backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _bytes(lowercase: bool) -> tokenizers.Tokenizer:
    """BPE without merges, whose ids are the bytes themselves."""
    # GPT-2's table: bytes that print stand for themselves, the others for the characters from U+0100 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(BYTES)) - set(visible))
    vocab = {chr(byte): byte for byte in visible} | {chr(BYTES + i): byte for i, byte in enumerate(hidden)}
    vocab |= {name: BYTES + i for i, name in enumerate(SPECIAL_OF["bytes"])}
    model = tokenizers.models.BPE(vocab=vocab, merges=[])
    return _with_special(_bytelevel(model, lowercase, split=False), SPECIAL_OF["bytes"])


def _bpe(lowercase: bool) -> tokenizers.Tokenizer:
    return _bytelevel(tokenizers.models.BPE(), lowercase, split=True)


def _wordpiece(lowercase: bool, model: Any = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model or tokenizers.models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    return backend


def _unigram(lowercase: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
    steps = [tokenizers.normalizers.NFKC(), *([tokenizers.normalizers.Lowercase()] if lowercase else [])]
    backend.normalizer = tokenizers.normalizers.Sequence(steps)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    return backend


def without_special_pieces(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A trained Unigram that finds no special token in a text: its trainer makes them the best pieces."""
    data = json.loads(backend.to_str())
    for piece in data["model"]["vocab"][: len(SPECIAL_OF["unigram"])]:
        piece[1] = _NEVER
    return tokenizers.Tokenizer.from_str(json.dumps(data))


PIPELINES: dict[str, Callable[[bool], tokenizers.Tokenizer]] = {
    "bytes": _bytes,
    "bpe": _bpe,
    "wordpiece": _wordpiece,
    "unigram": _unigram,
}


def _known_special(vocab: Iterable[str]) -> list[str]:
    names = {name for group in NAMES.values() for name in group}
    return [token for token in vocab if token in names]


def load_json(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))


def load_wordpiece(path: Path, lowercase: bool | None) -> tokenizers.Tokenizer:
    tokens = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if "[UNK]" not in vocab:
        raise InputError(f"{path}: not a WordPiece vocabulary: it has no line [UNK]")
    special = _known_special(vocab)
    if lowercase is None:
        lowercase = not any(token != token.lower() for token in vocab if not token.startswith("["))
    model = tokenizers.models.WordPiece(vocab=vocab, unk_token="[UNK]")
    return _with_special(_wordpiece(lowercase, model), special)


def load_bpe(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    if not merges.is_file():
        raise InputError(f"{merges}: no such file; a vocab.json needs the merges of its BPE beside it")
    model = tokenizers.models.BPE
    tokens, pairs = model.read_file(str(vocab), str(merges))
    return _with_special(
        _bytelevel(model(tokens, pairs), lowercase=False, split=True), _known_special(tokens)
    )


def trainer(algorithm: str, vocab_size: int) -> Any:
    """What learns the vocabulary of `bpe`, `wordpiece` or `unigram`."""
    common = {
        "vocab_size": vocab_size,
        "special_tokens": list(SPECIAL_OF[algorithm]),
        "show_progress": False,
    }
    if algorithm == "bpe":
        return tokenizers.trainers.BpeTrainer(
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), **common
        )
    if algorithm == "wordpiece":
        return tokenizers.trainers.WordPieceTrainer(**common)
    return tokenizers.trainers.UnigramTrainer(unk_token="<unk>", **common)
