"""The pipelines of the `tokenizers` library behind `Tokenizer`: each algorithm's parts, trainer and files."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from polyformer.core.errors import InputError
from polyformer.core.files import read_json
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


def wordpiece(
    lowercase: bool, vocab: dict[str, int] | None = None, unknown: str = "[UNK]"
) -> tokenizers.Tokenizer:
    """The pipeline of WordPiece (BERT)."""
    model = models.WordPiece(vocab, unk_token=unknown)
    backend = tokenizers.Tokenizer(model)
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
    "wordpiece": wordpiece,
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


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever comes of a file that cannot be read into an `InputError` that names it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the library's own errors are bare
        what = "not a tokenizer" if path.is_dir() else "not a tokenizer file"
        raise InputError(f"{path}: {what}, or a damaged one ({error})") from error


def load_json(path: Path) -> tokenizers.Tokenizer:
    with reading(path):
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))


def without_special(backend: tokenizers.Tokenizer, ids: Iterable[int | None]) -> None:
    """Let no text have the tokens of `ids`, which Unigram finds as it finds any piece of its vocabulary.

    Where one is written in a text, its first character stands apart from the rest.
    """
    if not isinstance(backend.model, models.Unigram):
        return
    rests: dict[str, list[str]] = {}
    for number in ids:
        name = "" if number is None else backend.id_to_token(number) or ""
        if len(name) > 1 and number in backend.encode(name, add_special_tokens=False).ids:
            rests.setdefault(re.escape(name[0]), []).append(re.escape(name[1:]))
    if rests:
        split = "|".join(f"{first}(?={'|'.join(sorted(rests[first]))})" for first in sorted(rests))
        apart = pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated")
        before = backend.pre_tokenizer
        backend.pre_tokenizer = apart if before is None else pre_tokenizers.Sequence([before, apart])


def read_wordpiece(path: Path, unknown: str = "[UNK]") -> dict[str, int]:
    """The ids of a vocab.txt, which has a token on each line."""
    with reading(path):
        tokens = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if unknown not in vocab:
        raise InputError(f"{path}: not a WordPiece vocabulary: it has no line {unknown}")
    return vocab


def without_capitals(vocab: Iterable[str]) -> bool:
    """Whether no ordinary token has a capital letter: then texts are lowered."""
    return not any(token != token.lower() for token in vocab if not token.startswith("["))


def load_wordpiece(path: Path, lowercase: bool | None) -> tokenizers.Tokenizer:
    vocab = read_wordpiece(path)
    lowercase = without_capitals(vocab) if lowercase is None else lowercase
    return _with_special(wordpiece(lowercase, vocab), _known_special(vocab))


def read_vocab(path: Path) -> dict[str, int]:
    """The tokens of a vocab.json in the order of their ids, which must be 0, 1, ..."""
    vocab = read_json(path)
    if not isinstance(vocab, dict) or {*map(repr, vocab.values())} != {*map(repr, range(len(vocab)))}:
        raise InputError(f"{path}: expected tokens with the ids 0, 1, ..., each once")
    return dict(sorted(vocab.items(), key=lambda item: item[1]))


def read_bpe(vocab: Path, merges: Path, **options: str) -> models.BPE:
    """The BPE of a vocab.json and a merges.txt; `options` are the library's."""
    if not merges.is_file():
        raise InputError(f"{merges}: no such file; a vocab.json needs the merges of its BPE beside it")
    with reading(vocab):
        tokens, pairs = models.BPE.read_file(str(vocab), str(merges))
        return models.BPE(tokens, pairs, **options)


def load_bpe(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    backend = _bytelevel(read_bpe(vocab, merges), lowercase=False, split=True)
    lines = merges.read_text(encoding="utf-8").splitlines()
    if 10 * sum(line.endswith("</w>") for line in lines) > len(lines):
        raise InputError(
            f"{merges}: the merges of words that end by </w>, as in GPT, CTRL and XLM; which of them it is "
            "must be said by tokenizer_class in a tokenizer_config.json beside it, or by the model_type of a "
            "config.json"
        )
    return _with_special(backend, _known_special(backend.get_vocab()))


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
