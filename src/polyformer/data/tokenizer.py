"""Text to token ids and back: bytes, BPE, WordPiece or Unigram, trained here or loaded.

A thin layer over the `tokenizers` library: one place for the special tokens' names, for the pipelines of each
algorithm, and for errors. Text is text: what looks like a special token in it is encoded as plain characters.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError

if TYPE_CHECKING:
    import tokenizers

# The names a special token goes by, ours first; <s>, </s>, [CLS] and [SEP] serve two roles where need be.
_NAMES = {
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
    "bos": ("<s>", "<bos>", "[BOS]", "<|endoftext|>", "[CLS]"),
    "eos": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "[SEP]"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("<mask>", "[MASK]"),
}
_SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")
_SPECIAL_OF = {
    "bytes": _SPECIAL,
    "bpe": _SPECIAL,
    "unigram": (*_SPECIAL, "<unk>"),
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
}
_BYTES = 256
_NEVER = -1e6  # a log probability below that of any text spelt character by character


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config):
    """How to make a tokenizer: train one, or load the one at `path`."""

    algorithm: Literal["bytes", "bpe", "wordpiece", "unigram"] = "bpe"  # bytes and bpe keep every character
    vocab_size: int = 8192  # special tokens included; bytes always have 260
    lowercase: bool = False
    path: str | None = None  # tokenizer.json, vocab.txt or a directory with one; then nothing is trained

    def __post_init__(self) -> None:
        if self.algorithm not in _SPECIAL_OF:
            raise InputError(f"algorithm: expected one of {', '.join(_SPECIAL_OF)}, got {self.algorithm!r}")
        least = len(_SPECIAL_OF[self.algorithm]) + (_BYTES if self.algorithm == "bpe" else 1)
        if self.algorithm != "bytes" and self.vocab_size < least:
            raise InputError(
                f"vocab_size: expected at least {least} for {self.algorithm}, got {self.vocab_size}"
            )


class Tokenizer:
    """Text <-> token ids.

    `pad_id`, `unk_id`, `bos_id`, `eos_id`, `cls_id`, `sep_id`, `mask_id` are None when absent; `special_ids` are all of those that exist and any other special token; `ordinary_ids` [V'] the rest.
    Encoding adds no special token: who wants `bos` or `eos` puts it there.
    """

    def __init__(self, backend: "tokenizers.Tokenizer") -> None:
        backend.encode_special_tokens = True  # "</s>" in a text is four characters, not the end of it
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        ids = {role: _first(backend, names) for role, names in _NAMES.items()}
        self.pad_id, self.unk_id, self.mask_id = ids["pad"], ids["unk"], ids["mask"]
        self.bos_id, self.eos_id, self.cls_id, self.sep_id = ids["bos"], ids["eos"], ids["cls"], ids["sep"]
        added = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(added | {number for number in ids.values() if number is not None})
        self.ordinary_ids = np.setdiff1d(np.arange(len(self)), list(self.special_ids))

    @classmethod
    def build(cls, config: TokenizerConfig, texts: Iterable[str]) -> Self:
        """The tokenizer that `config` describes: loaded from its path, or trained on `texts`."""
        return cls.load(config.path) if config.path else cls.train(config, texts)

    @classmethod
    def train(cls, config: TokenizerConfig, texts: Iterable[str]) -> Self:
        """A tokenizer learnt from `texts`, read once; the same texts give the same tokenizer."""
        backend = _PIPELINES[config.algorithm](config.lowercase)
        if config.algorithm == "bytes":
            return cls(backend)
        try:
            backend.train_from_iterator(_not_empty(texts), _trainer(config))
        except Exception as error:
            if type(error) is not Exception:  # the library's own errors are bare; others come from the texts
                raise
            raise InputError(
                f"vocab_size: {config.vocab_size} is too small for these texts ({error})"
            ) from error
        return cls(_without_special_pieces(backend) if config.algorithm == "unigram" else backend)

    @classmethod
    def load(
        cls, path: str | Path, *, merges: str | Path | None = None, lowercase: bool | None = None
    ) -> Self:
        """The tokenizer in `path`: a directory, `tokenizer.json`, `vocab.txt` (WordPiece) or `vocab.json`.

        A `vocab.json` (byte-level BPE) needs its `merges`, by default the `merges.txt` beside it. `lowercase`
        is for `vocab.txt`, which does not say it: by default true when no ordinary token has a capital
        letter. In a directory, `tokenizer.json` is preferred, then `vocab.txt`, then `vocab.json`.
        """
        path = _find(Path(path))
        try:
            if path.suffix == ".txt":
                return cls(_load_wordpiece(path, lowercase))
            if merges is not None or path.name == "vocab.json":
                return cls(_load_bpe(path, Path(merges) if merges else path.with_name("merges.txt")))
            return cls(_tokenizers().Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except InputError:
            raise
        except Exception as error:  # the library raises bare Exception for whatever it cannot read
            raise InputError(f"{path}: not a tokenizer file, or a damaged one ({error})") from error

    def save(self, directory: str | Path) -> Path:
        """Write `tokenizer.json` into `directory` (made if absent), and say where."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        target = Path(directory) / "tokenizer.json"
        target.write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        return target

    def export(self, directory: str | Path) -> list[Path]:
        """Write the algorithm's own files: `vocab.txt` (WordPiece) or `vocab.json`, `merges.txt` (BPE)."""
        models = _tokenizers().models
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if isinstance(self.backend.model, models.BPE | models.WordPiece):
            return [Path(name) for name in self.backend.model.save(str(directory))]
        raise InputError(
            f"{directory}: only BPE and WordPiece have files of their own; use save() for tokenizer.json"
        )

    def __len__(self) -> int:
        """The size of the vocabulary, special tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; several texts are encoded in parallel."""
        try:
            encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            bad = next((text for text in texts if not _is_text(text)), texts)
            raise InputError(
                f"text: expected a string of whole Unicode characters, got {bad!r:.60}"
            ) from error
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of `ids`, special tokens left out unless kept; exact for bytes and byte-level BPE."""
        return self.backend.decode([int(number) for number in ids], skip_special_tokens=not keep_special)

    def token(self, number: int) -> str:
        """The name of one id, as it stands in the vocabulary."""
        name = self.backend.id_to_token(number)
        if name is None:
            raise InputError(f"id: expected 0 to {len(self) - 1}, got {number}")
        return name


def _tokenizers() -> Any:
    import tokenizers

    return tokenizers


def _first(backend: "tokenizers.Tokenizer", names: Sequence[str]) -> int | None:
    found = [number for name in names if (number := backend.token_to_id(name)) is not None]
    return found[0] if found else None


def _with_special(backend: "tokenizers.Tokenizer", names: Iterable[str]) -> "tokenizers.Tokenizer":
    tokens = [_tokenizers().AddedToken(name, special=True, normalized=False) for name in names]
    backend.add_special_tokens(tokens)
    return backend


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _not_empty(texts: Iterable[str]) -> Iterable[str]:
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise InputError("texts: a tokenizer cannot be trained on no text")


def _bytelevel(model: Any, lowercase: bool, split: bool) -> "tokenizers.Tokenizer":
    """The pipeline of byte-level BPE (GPT-2): every byte is a character, so that nothing is unknown."""
    library = _tokenizers()
    backend = library.Tokenizer(model)
    if lowercase:
        backend.normalizer = library.normalizers.Lowercase()
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    backend.decoder = library.decoders.ByteLevel()
    return backend


def _bytes(lowercase: bool) -> "tokenizers.Tokenizer":
    """BPE without merges, whose ids are the bytes themselves."""
    # GPT-2's table: bytes that print stand for themselves, the others for the characters from U+0100 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(_BYTES)) - set(visible))
    vocab = {chr(byte): byte for byte in visible} | {chr(_BYTES + i): byte for i, byte in enumerate(hidden)}
    vocab |= {name: _BYTES + i for i, name in enumerate(_SPECIAL)}
    model = _tokenizers().models.BPE(vocab=vocab, merges=[])
    return _with_special(_bytelevel(model, lowercase, split=False), _SPECIAL)


def _bpe(lowercase: bool) -> "tokenizers.Tokenizer":
    return _bytelevel(_tokenizers().models.BPE(), lowercase, split=True)


def _wordpiece(lowercase: bool, model: Any = None) -> "tokenizers.Tokenizer":
    library = _tokenizers()
    backend = library.Tokenizer(model or library.models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    backend.decoder = library.decoders.WordPiece()
    return backend


def _unigram(lowercase: bool) -> "tokenizers.Tokenizer":
    library = _tokenizers()
    backend = library.Tokenizer(library.models.Unigram())
    steps = [library.normalizers.NFKC(), *([library.normalizers.Lowercase()] if lowercase else [])]
    backend.normalizer = library.normalizers.Sequence(steps)
    backend.pre_tokenizer = library.pre_tokenizers.Metaspace()
    backend.decoder = library.decoders.Metaspace()
    return backend


def _without_special_pieces(backend: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
    """A trained Unigram that finds no special token in a text: its trainer makes them the best pieces."""
    data = json.loads(backend.to_str())
    for piece in data["model"]["vocab"][: len(_SPECIAL_OF["unigram"])]:
        piece[1] = _NEVER
    return _tokenizers().Tokenizer.from_str(json.dumps(data))


_PIPELINES: dict[str, Callable[[bool], "tokenizers.Tokenizer"]] = {
    "bytes": _bytes,
    "bpe": _bpe,
    "wordpiece": _wordpiece,
    "unigram": _unigram,
}


def _trainer(config: TokenizerConfig) -> Any:
    library = _tokenizers()
    common = {
        "vocab_size": config.vocab_size,
        "special_tokens": list(_SPECIAL_OF[config.algorithm]),
        "show_progress": False,
    }
    if config.algorithm == "bpe":
        return library.trainers.BpeTrainer(
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()), **common
        )
    if config.algorithm == "wordpiece":
        return library.trainers.WordPieceTrainer(**common)
    return library.trainers.UnigramTrainer(unk_token="<unk>", **common)


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise InputError(
            f"{path}: no such tokenizer; expected a tokenizer.json, a vocab.txt or a directory with one"
        )
    names = ("tokenizer.json", "vocab.txt", "vocab.json")
    for name in names:
        if (path / name).is_file():
            return path / name
    raise InputError(f"{path}: no tokenizer in this directory; expected one of {', '.join(names)} in it")


def _known_special(vocab: Iterable[str]) -> list[str]:
    names = {name for group in _NAMES.values() for name in group}
    return [token for token in vocab if token in names]


def _load_wordpiece(path: Path, lowercase: bool | None) -> "tokenizers.Tokenizer":
    tokens = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if "[UNK]" not in vocab:
        raise InputError(f"{path}: not a WordPiece vocabulary: it has no line [UNK]")
    special = _known_special(vocab)
    if lowercase is None:
        lowercase = not any(token != token.lower() for token in vocab if not token.startswith("["))
    model = _tokenizers().models.WordPiece(vocab=vocab, unk_token="[UNK]")
    return _with_special(_wordpiece(lowercase, model), special)


def _load_bpe(vocab: Path, merges: Path) -> "tokenizers.Tokenizer":
    if not merges.is_file():
        raise InputError(f"{merges}: no such file; a vocab.json needs the merges of its BPE beside it")
    model = _tokenizers().models.BPE
    tokens, pairs = model.read_file(str(vocab), str(merges))
    return _with_special(
        _bytelevel(model(tokens, pairs), lowercase=False, split=True), _known_special(tokens)
    )
