"""Text to token ids and back: bytes, BPE, WordPiece or Unigram, trained here or loaded.

A thin layer over the `tokenizers` library: one place for the special tokens' names, for the pipelines of each
algorithm, and for errors. Text is text: what looks like a special token in it is encoded as plain characters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data.special_tokens import BYTES, NAMES, SPECIAL_OF

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config):
    """How to make a tokenizer: train one, or load the one at `path`."""

    algorithm: Literal["bytes", "bpe", "wordpiece", "unigram"] = "bpe"  # bytes and bpe keep every character
    vocab_size: int = 8192  # special tokens included; bytes always have 260
    lowercase: bool = False
    path: str | None = None  # tokenizer.json, vocab.txt or a directory with one; then nothing is trained

    def __post_init__(self) -> None:
        if self.algorithm not in SPECIAL_OF:
            raise InputError(f"algorithm: expected one of {', '.join(SPECIAL_OF)}, got {self.algorithm!r}")
        least = len(SPECIAL_OF[self.algorithm]) + (BYTES if self.algorithm == "bpe" else 1)
        if self.algorithm != "bytes" and self.vocab_size < least:
            raise InputError(
                f"vocab_size: expected at least {least} for {self.algorithm}, got {self.vocab_size}"
            )


class Tokenizer:
    """Text <-> token ids.

    `pad_id`, `unk_id`, `bos_id`, `eos_id`, `cls_id`, `sep_id`, `mask_id` are None when absent; `special_ids`
    are all of those that exist and any other special token; `ordinary_ids` [V'] the rest. Encoding adds
    no special token: who wants `bos` or `eos` puts it there.
    """

    def __init__(self, backend: "tokenizers.Tokenizer") -> None:
        backend.encode_special_tokens = True  # "</s>" in a text is four characters, not the end of it
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        ids = {role: _first(backend, names) for role, names in NAMES.items()}
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
        """A tokenizer learnt from `texts`: always the same from the same texts, but for Unigram.

        `texts` are read once, by WordPiece twice (an iterator is then held in memory). Unigram's scores are
        summed in the order of a hash table, so that their last digits, and with them ids, differ each time.
        """
        from polyformer.data import pipelines

        try:
            return cls(pipelines.train(config.algorithm, config.lowercase, config.vocab_size, texts))
        except Exception as error:
            if type(error) is not Exception:  # the library's own errors are bare; others come from the texts
                raise
            raise InputError(
                f"vocab_size: {config.vocab_size} is too small for these texts ({error})"
            ) from error

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Self:
        """Words to the ids 0, 1, ..., nothing learnt; those that are names of special tokens are special."""
        from polyformer.data import pipelines

        return cls(pipelines.of_words(words))

    @classmethod
    def load(
        cls, path: str | Path, *, merges: str | Path | None = None, lowercase: bool | None = None
    ) -> Self:
        """The tokenizer in `path`: a directory, `tokenizer.json`, `vocab.txt` (WordPiece) or `vocab.json`.

        A `vocab.json` (byte-level BPE) needs its `merges`, by default the `merges.txt` beside it. `lowercase`
        is for `vocab.txt`, which does not say it: by default true when no ordinary token has a capital
        letter. In a directory, `tokenizer.json` is preferred, then `vocab.txt`, then `vocab.json`.
        """
        from polyformer.data import pipelines

        path = _find(Path(path))
        try:
            if path.suffix == ".txt":
                return cls(pipelines.load_wordpiece(path, lowercase))
            if merges is not None or path.name == "vocab.json":
                pairs = Path(merges) if merges else path.with_name("merges.txt")
                return cls(pipelines.load_bpe(path, pairs))
            return cls(pipelines.load_json(path))
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
        from tokenizers import models

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


def _first(backend: "tokenizers.Tokenizer", names: Sequence[str]) -> int | None:
    found = [number for name in names if (number := backend.token_to_id(name)) is not None]
    return found[0] if found else None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


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
