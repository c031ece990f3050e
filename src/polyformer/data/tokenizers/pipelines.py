"""Pipelines of the `tokenizers` library for `Tokenizer`: parts, loading from common files, and training.

Five kinds are trained: bytes, characters, BPE, WordPiece and Unigram. Texts are normalized first, and the
tokenizer normalizes its input in the same way: two Unicode spellings of a text (a letter and its accents as
one character, or as several) then have the same tokens.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from polyformer.core.errors import InputError
from polyformer.core.files import read_json
from polyformer.core.ranges import SIZE
from polyformer.data.tokenizers.special_tokens import BYTES, NAMES, SPECIAL_OF

UNUSED_CHARACTER = "\U0010ffff"
"""A code point that never becomes a character, and so is unknown to tokenizers."""


def with_special(backend: tokenizers.Tokenizer, names: Iterable[str]) -> tokenizers.Tokenizer:
    """Return the pipeline with these special tokens added."""
    tokens = [tokenizers.AddedToken(name, special=True, normalized=False) for name in names]
    backend.add_special_tokens(tokens)
    return backend


def bytelevel(model: Any, split: bool) -> tokenizers.Tokenizer:
    """Return the pipeline of byte-level BPE (GPT-2): every byte is a character, so nothing is unknown."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    backend.decoder = decoders.ByteLevel()
    return backend


def wordpiece(lowercase: bool, vocab: dict[str, int] | None = None) -> tokenizers.Tokenizer:
    """Return the pipeline of WordPiece (BERT)."""
    model = models.WordPiece(vocab, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _known_special(vocab: Iterable[str]) -> list[str]:
    names = {name for group in NAMES.values() for name in group}
    return [token for token in vocab if token in names]


def of_words(words: Iterable[str]) -> tokenizers.Tokenizer:
    """Return a pipeline that splits at white space and maps words to the ids 0, 1, ..."""
    vocab = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=""))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_special(backend, _known_special(vocab))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors of an unreadable file to an `InputError` that names it."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:  # the library raises plain exceptions
        if not isinstance(error, Exception) and not (type(error).__name__ == "PanicException"):
            raise
        what = "not a tokenizer" if path.is_dir() else "not a tokenizer file"
        raise InputError(f"{path}: {what}, or a damaged one ({error})") from error


def load_json(path: Path) -> tokenizers.Tokenizer:
    """Load the pipeline in a tokenizer.json; raises `InputError` if it is damaged."""
    with reading(path):
        return from_json(path.read_text(encoding="utf-8"))


def from_json(text: str) -> tokenizers.Tokenizer:
    """Return the pipeline that the text of a tokenizer.json describes, with the exact scores of Unigram.

    The library's reader changes the last digit of every eighth score, so that a tokenizer would differ from
    its own file, and a little more after each time that it is saved.
    """
    backend = tokenizers.Tokenizer.from_str(text)
    if isinstance(backend.model, models.Unigram):
        model = json.loads(text)["model"]
        pieces = [(piece, float(score)) for piece, score in model["vocab"]]
        backend.model = models.Unigram(pieces, model.get("unk_id"), model.get("byte_fallback", False))
    return backend


def with_prefix_space(backend: tokenizers.Tokenizer, prefix: bool) -> tokenizers.Tokenizer:
    """Return the pipeline that adds a space before a text, or adds none, whatever its file says."""
    described = json.loads(backend.to_str())

    def changed(part: Any) -> Any:
        """Return a part of the pipeline with this setting; None for one that only adds the space."""
        if not isinstance(part, dict):
            return part
        kind = part.get("type")
        if kind == "Sequence":
            name = next(name for name in part if name != "type")
            return {**part, name: [new for old in part[name] if (new := changed(old)) is not None]}
        if kind == "ByteLevel":
            return {**part, "add_prefix_space": prefix}
        if kind == "Metaspace" and prefix != (part["prepend_scheme"] != "never"):
            return {**part, "prepend_scheme": "always" if prefix else "never"}
        is_space = kind == "Prepend" or (kind == "Strip" and part.get("content") == " ")
        return None if is_space and not prefix else part

    steps = {name: changed(described[name]) for name in ("normalizer", "pre_tokenizer", "decoder")}
    return from_json(json.dumps({**described, **steps}))


def without_special(backend: tokenizers.Tokenizer, ids: Iterable[int]) -> None:
    """Prevent texts from being encoded to the tokens of `ids`, which Unigram finds like any piece.

    If the name of such a token occurs in a text, it is split between two characters that no piece contains
    together, or after the first.
    """
    if not isinstance(backend.model, models.Unigram):
        return
    vocab, names = backend.get_vocab(), {number: backend.id_to_token(number) or "" for number in ids}

    def is_found(number: int) -> bool:
        if number not in backend.encode(names[number], add_special_tokens=False).ids:
            return False
        # The unknown token may also be that of the characters of its name.
        return number not in unknown or any(character in vocab for character in names[number])

    unknown = backend.encode(UNUSED_CHARACTER, add_special_tokens=False).ids
    split_names(backend, [name for number, name in names.items() if is_found(number)])


def split_names(backend: tokenizers.Tokenizer, names: Iterable[str]) -> None:
    """Split `names` in texts, so that none of them is a single token."""
    names = sorted(name for name in names if len(name) > 1)
    if not names:
        return
    vocab, pairs = backend.get_vocab(), {name[i : i + 2] for name in names for i in range(len(name) - 1)}
    joined = {pair for piece in vocab.keys() - names for pair in pairs if pair in piece}
    rests: dict[str, list[str]] = {}
    for name in names:
        free = [i for i in range(1, len(name)) if name[i - 1 : i + 1] not in joined]
        # Unknown characters in succession are one token.
        known = [i for i in free if any(character in vocab for character in name[i - 1 : i + 1])]
        place = [*known, *free, 1][0]
        rests.setdefault(re.escape(name[:place]), []).append(re.escape(name[place:]))
    pattern = "|".join(f"{first}(?={'|'.join(rests[first])})" for first in rests)
    then(backend, pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="merged_with_previous"))


def then(backend: tokenizers.Tokenizer, step: Any) -> None:
    """Add a last step to the pre-tokenizer, unless a saved tokenizer has it already."""
    before = backend.pre_tokenizer
    if before is None:
        backend.pre_tokenizer = step
        return
    last = json.loads(before.__getstate__())
    while last.get("pretokenizers"):
        last = last["pretokenizers"][-1]
    if last != json.loads(step.__getstate__()):
        backend.pre_tokenizer = pre_tokenizers.Sequence([before, step])


def load_wordpiece(path: Path, lowercase: bool | None) -> tokenizers.Tokenizer:
    """Load BERT's pipeline from a vocab.txt, which has a token on each line.

    By default texts are converted to lower case if no ordinary token has a capital letter.
    """
    with reading(path):
        tokens = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if "[UNK]" not in vocab:
        raise InputError(f"{path}: not a WordPiece vocabulary: it has no line [UNK]")
    if lowercase is None:
        lowercase = not any(token != token.lower() for token in vocab if not token.startswith("["))
    return with_special(wordpiece(lowercase, vocab), _known_special(vocab))


def read_vocab(path: Path) -> dict[str, int]:
    """Return the tokens of a vocab.json and their ids; raises `InputError` unless each id occurs once."""
    vocab = read_json(path, dict)
    ids = list(vocab.values())
    if not all(type(number) is int and 0 <= number <= SIZE for number in ids) or len({*ids}) < len(ids):
        raise InputError(f"{path}: expected tokens with ids from 0 to {SIZE}, each once")
    return vocab


def load_bpe(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    """Load GPT-2's byte-level pipeline from vocab.json and merges.txt."""
    if not merges.is_file():
        raise InputError(
            f"{merges}: no such file; a vocab.json needs the merges.txt of its BPE in the same folder"
        )
    read_vocab(vocab)
    with reading(vocab):
        backend = bytelevel(models.BPE(*models.BPE.read_file(str(vocab), str(merges))), split=True)
    lines = merges.read_text(encoding="utf-8").splitlines()
    if 10 * sum(line.endswith("</w>") for line in lines) > len(lines):
        raise InputError(
            f"{merges}: the merges of words that end by </w>, as in GPT, CTRL and XLM; which of them it is "
            "must be said by tokenizer_class in a tokenizer_config.json next to it, or by the model_type of "
            "a config.json"
        )
    return with_special(backend, _known_special(backend.get_vocab()))


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
