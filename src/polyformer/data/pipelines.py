"""The pipelines of the `tokenizers` library behind `Tokenizer`: each algorithm's parts, trainer and files."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from polyformer.core.errors import InputError
from polyformer.data.special_tokens import BYTES, NAMES, SPECIAL_OF


def _with_special(backend: tokenizers.Tokenizer, names: Iterable[str]) -> tokenizers.Tokenizer:
    tokens = [tokenizers.AddedToken(name, special=True, normalized=False) for name in names]
    backend.add_special_tokens(tokens)
    return backend


def _bytelevel(model: Any, lowercase: bool, split: bool) -> tokenizers.Tokenizer:
    """The pipeline of byte-level BPE (GPT-2): every byte is a character, so that nothing is unknown."""
    backend = tokenizers.Tokenizer(model)
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    backend.decoder = decoders.ByteLevel()
    return backend


def _bytes(lowercase: bool) -> tokenizers.Tokenizer:
    """BPE without merges, whose ids are the bytes themselves."""
    # GPT-2's table: bytes that print stand for themselves, the others for the characters from U+0100 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(BYTES)) - set(visible))
    vocab = {chr(byte): byte for byte in visible} | {chr(BYTES + i): byte for i, byte in enumerate(hidden)}
    vocab |= {name: BYTES + i for i, name in enumerate(SPECIAL_OF["bytes"])}
    model = models.BPE(vocab=vocab, merges=[])
    return _with_special(_bytelevel(model, lowercase, split=False), SPECIAL_OF["bytes"])


def _bpe(lowercase: bool) -> tokenizers.Tokenizer:
    return _bytelevel(models.BPE(), lowercase, split=True)


def _wordpiece(lowercase: bool, model: Any = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model or models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _unigram(lowercase: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    steps = [normalizers.NFKC(), *([normalizers.Lowercase()] if lowercase else [])]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


_PIPELINES: dict[str, Callable[[bool], tokenizers.Tokenizer]] = {
    "bytes": _bytes,
    "bpe": _bpe,
    "wordpiece": _wordpiece,
    "unigram": _unigram,
}


def _known_special(vocab: Iterable[str]) -> list[str]:
    names = {name for group in NAMES.values() for name in group}
    return [token for token in vocab if token in names]


def of_words(words: Iterable[str]) -> tokenizers.Tokenizer:
    vocab = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=""))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with_special(backend, _known_special(vocab))


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
    model = models.WordPiece(vocab=vocab, unk_token="[UNK]")
    return _with_special(_wordpiece(lowercase, model), special)


def load_bpe(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    if not merges.is_file():
        raise InputError(f"{merges}: no such file; a vocab.json needs the merges of its BPE beside it")
    model = models.BPE
    tokens, pairs = model.read_file(str(vocab), str(merges))
    return _with_special(
        _bytelevel(model(tokens, pairs), lowercase=False, split=True), _known_special(tokens)
    )


def train(algorithm: str, lowercase: bool, vocab_size: int, texts: Iterable[str]) -> tokenizers.Tokenizer:
    """A tokenizer whose vocabulary is learnt from `texts`; bytes have nothing to learn."""
    backend = _PIPELINES[algorithm](lowercase)
    if algorithm == "wordpiece":
        return _train_wordpiece(backend, vocab_size, list(texts) if isinstance(texts, Iterator) else texts)
    special = list(SPECIAL_OF[algorithm])
    if algorithm == "bpe":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend.train_from_iterator(
            _not_empty(texts),
            trainers.BpeTrainer(
                vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
            ),
        )
    elif algorithm == "unigram":
        # Pieces that the trainer knows are found in texts, so all but the unknown one join afterwards.
        later = [name for name in special if name != "<unk>"]
        backend.train_from_iterator(
            _not_empty(texts),
            trainers.UnigramTrainer(
                vocab_size=vocab_size - len(later),
                special_tokens=["<unk>"],
                unk_token="<unk>",
                show_progress=False,
            ),
        )
        _with_special(backend, later)
    return backend


def _not_empty(texts: Iterable[str]) -> Iterable[str]:
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise InputError("texts: a tokenizer cannot be trained on no text")


def _train_wordpiece(
    backend: tokenizers.Tokenizer, vocab_size: int, texts: Iterable[str]
) -> tokenizers.Tokenizer:
    """WordPiece as the library trains it, but the same every time.

    The trainer numbers the single characters inside words (##e) in the order of a hash table, another each
    time, and breaks ties by these numbers (tokenizers issue 1794). Here they are numbered beforehand, which
    takes a pass over the texts and declares them special while training lasts.
    """
    characters = set(itertools.chain.from_iterable(texts))
    normalized = {part for one in characters for part in backend.normalizer.normalize_str(one)}
    split = backend.pre_tokenizer.pre_tokenize_str
    inside = ["##" + one for one in normalized if [word for word, _ in split("a" + one)] == ["a" + one]]
    special = SPECIAL_OF["wordpiece"]
    names = [*special, *sorted(inside)]
    backend.train_from_iterator(
        _not_empty(texts),
        trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=names, show_progress=False),
    )
    data = json.loads(backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    return tokenizers.Tokenizer.from_str(json.dumps(data))
