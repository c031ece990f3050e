"""Training of tokenizers with the `tokenizers` library: bytes, characters, BPE, WordPiece and Unigram.

Texts are normalized first, and the tokenizer normalizes its input in the same way: two Unicode spellings of a
text (a letter and its accents as one character, or as several) then have the same tokens.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from polyformer.core.errors import InputError
from polyformer.data.tokenizers.pipelines import bytelevel, with_special, wordpiece
from polyformer.data.tokenizers.special_tokens import BYTES, SPECIAL_OF

Backend = tokenizers.Tokenizer

_FORMS: dict[str, Any] = {
    "nfc": normalizers.NFC,
    "nfd": normalizers.NFD,
    "nfkc": normalizers.NFKC,
    "nfkd": normalizers.NFKD,
}


def train_tokenizer(
    algorithm: str, normalization: str, lowercase: bool, vocab_size: int, texts: Iterable[str]
) -> Backend:
    """Return a tokenizer with a vocabulary trained on `texts`; bytes require no training."""
    if algorithm == "wordpiece":
        backend = wordpiece(lowercase)
        steps = [*_form(normalization), backend.normalizer]  # does lower case, and strips accents like BERT
    else:
        backend = _PIPELINES[algorithm]()
        steps = [*_form(normalization), *([normalizers.Lowercase()] if lowercase else [])]
    if steps:
        backend.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)
    return backend if algorithm == "bytes" else _TRAINERS[algorithm](backend, vocab_size, texts)


def _form(normalization: str) -> list[Any]:
    return [] if normalization == "none" else [_FORMS[normalization]()]


def _bytes() -> Backend:
    """Return a BPE without merges, with the bytes as ids."""
    # GPT-2's table: printable bytes map to themselves, the others to the characters from U+0100 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(BYTES)) - set(visible))
    vocab = {chr(byte): byte for byte in visible} | {chr(BYTES + i): byte for i, byte in enumerate(hidden)}
    vocab |= {name: BYTES + i for i, name in enumerate(SPECIAL_OF["bytes"])}
    model = models.BPE(vocab=vocab, merges=[])
    return with_special(bytelevel(model, split=False), SPECIAL_OF["bytes"])


def _characters() -> Backend:
    """Return a tokenizer in which every character, including line ends and spaces, is a word."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _bpe() -> Backend:
    return bytelevel(models.BPE(), split=True)


def _unigram() -> Backend:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def _train_characters(backend: tokenizers.Tokenizer, vocab_size: int, texts: Iterable[str]) -> Backend:
    """Train on the most frequent characters; ties are resolved by Unicode order."""
    normalize = (lambda text: text) if backend.normalizer is None else backend.normalizer.normalize_str
    counts: Counter[str] = Counter()
    for text in _not_empty(texts):
        counts.update(normalize(text))
    special = SPECIAL_OF["characters"]
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    names = [*special, *sorted(ranked[: vocab_size - len(special)])]
    backend.model = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    return with_special(backend, special)


def _train_bpe(backend: tokenizers.Tokenizer, vocab_size: int, texts: Iterable[str]) -> Backend:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_OF["bpe"]),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_not_empty(texts), trainer)
    return backend


def _train_unigram(backend: tokenizers.Tokenizer, vocab_size: int, texts: Iterable[str]) -> Backend:
    # The trainer's pieces are found in texts, so all except the unknown token are added afterwards.
    later = [name for name in SPECIAL_OF["unigram"] if name != "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - len(later), special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(_not_empty(texts), trainer)
    return with_special(backend, later)


def _train_wordpiece(backend: tokenizers.Tokenizer, vocab_size: int, texts: Iterable[str]) -> Backend:
    """Train WordPiece with the library, but deterministically.

    The trainer numbers the single characters inside words (##e) in the order of a hash table, which varies,
    and breaks ties by these numbers (tokenizers issue 1794). Here they are numbered beforehand, which
    requires a pass over the texts and declares them special during training.
    """
    texts = list(texts) if isinstance(texts, Iterator) else texts
    normalize, split = backend.normalizer.normalize_str, backend.pre_tokenizer.pre_tokenize_str
    characters = set(itertools.chain.from_iterable(map(normalize, texts)))
    stays = lambda text: [word for word, _ in split(text)] == [text]  # noqa: E731
    inside = ["##" + character for character in characters if stays("a" + character)]
    special = SPECIAL_OF["wordpiece"]
    names = [*special, *sorted(inside)]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=names, show_progress=False)
    backend.train_from_iterator(_not_empty(texts), trainer)
    data = json.loads(backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def _not_empty(texts: Iterable[str]) -> Iterator[str]:
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise InputError("texts: a tokenizer cannot be trained on no text")


_PIPELINES = {"bytes": _bytes, "characters": _characters, "bpe": _bpe, "unigram": _unigram}
_TRAINERS = {
    "characters": _train_characters,
    "bpe": _train_bpe,
    "unigram": _train_unigram,
    "wordpiece": _train_wordpiece,
}
