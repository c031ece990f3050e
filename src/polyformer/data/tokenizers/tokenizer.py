"""Conversion between text and token ids: bytes, characters, BPE, WordPiece or Unigram, trained or loaded.

A thin layer over the `tokenizers` library, which collects the special tokens' names, the pipelines of each
algorithm, and the errors. Text that looks like a special token is encoded as plain characters. Only
`encode_for_model` adds special tokens, and recognizes them in the text, as transformers' tokenizers do.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import atomic_write, write_json
from polyformer.data.chat import ChatTemplate, RenderedChat, write_templates
from polyformer.data.tokenizers.special_tokens import BYTES, NAMES, SPECIAL_OF

PIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model", "spm_char.model")
"""Usual file names of SentencePiece models in checkpoints."""

Normalization = Literal["nfc", "nfd", "nfkc", "nfkd", "none"]

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config):
    """Options of a tokenizer: train it, or load it from `path`.

    `normalization` is the Unicode form to which texts are converted first (Unicode Standard Annex 15).
    Without it, a text with separate accent characters (NFD, as macOS writes file names) has other tokens than
    the same text in the usual form (NFC), several times more in Vietnamese. The form is saved in the
    tokenizer's file; a loaded tokenizer keeps its normalization.
    """

    algorithm: Literal["bytes", "characters", "bpe", "wordpiece", "unigram"] = "bpe"
    # bytes and bpe encode every character; bytes always have 260 tokens, characters at most the number that
    # occurs
    vocab_size: int = 8192  # including special tokens
    normalization: Normalization | None = None  # None: nfkc for unigram, as in SentencePiece; else nfc
    lowercase: bool = False
    path: str | None = None  # file or directory of a tokenizer, to load instead of training

    def __post_init__(self) -> None:
        least = len(SPECIAL_OF[self.algorithm]) + (BYTES if self.algorithm == "bpe" else 1)
        if self.algorithm != "bytes" and self.vocab_size < least:
            raise InputError(
                f"vocab_size: expected at least {least} for {self.algorithm}, got {self.vocab_size}"
            )


class Tokenizer:
    """A tokenizer: conversion between text and token ids.

    `pad_id`, `unk_id`, `bos_id`, `eos_id`, `cls_id`, `sep_id`, `mask_id` are None when absent. `special_ids`
    are all that exist and any other special token; `ordinary_ids` [V'] the rest. Encoding adds no special
    tokens, except `encode_for_model`; callers add `bos` or `eos`. `roles` names the tokens of roles, or None
    for no token; other roles use the usual names. `chat` has the templates of conversations in its files.
    """

    def __init__(
        self, backend: "tokenizers.Tokenizer", roles: Mapping[str, str | None] | None = None
    ) -> None:
        from polyformer.data.tokenizers.pipelines import without_special

        # A setting of a checkpoint: models read special tokens in texts as characters.
        self.splits_special = False
        self.chat: ChatTemplate | None = None
        backend.encode_special_tokens = True  # "</s>" in a text is four characters, not a special token
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.roles = {role: _first(backend, names) for role, names in NAMES.items()} | dict(roles or {})
        ids = {role: None if name is None else backend.token_to_id(name) for role, name in self.roles.items()}
        self.pad_id, self.unk_id, self.mask_id = ids["pad"], ids["unk"], ids["mask"]
        self.bos_id, self.eos_id, self.cls_id, self.sep_id = ids["bos"], ids["eos"], ids["cls"], ids["sep"]
        added = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(added | {number for number in ids.values() if number is not None})
        # A piece of SentencePiece with the usual name of a role, which texts may contain.
        self.symbols = {name for role, name in self.roles.items() if name and role not in (roles or {})}
        known = added if self.unk_id is None else added | {self.unk_id}
        self.symbols -= {backend.id_to_token(number) for number in known}
        without_special(backend, known)
        self.ordinary_ids = np.setdiff1d(np.arange(len(self)), list(self.special_ids))

    @classmethod
    def train(cls, config: TokenizerConfig, texts: Iterable[str]) -> Self:
        """Train a tokenizer on `texts`, deterministically except for Unigram.

        `texts` are read once, by WordPiece twice (an iterator is then held in memory). Unigram's scores are
        summed in the order of a hash table, so that their last digits, and thereby ids, vary between runs.
        """
        from polyformer.data.tokenizers.pipelines import train_tokenizer

        normalization = config.normalization or ("nfkc" if config.algorithm == "unigram" else "nfc")
        options = config.algorithm, normalization, config.lowercase, config.vocab_size
        try:
            return cls(train_tokenizer(*options, texts))
        except Exception as error:
            if type(error) is not Exception:  # the library raises plain ones; others come from the texts
                raise
            raise InputError(
                f"vocab_size: {config.vocab_size} is too small for these texts ({error})"
            ) from error

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Self:
        """Map words to the ids 0, 1, ..., without training; names of special tokens become special."""
        from polyformer.data.tokenizers import pipelines

        return cls(pipelines.of_words(words))

    def save(self, directory: str | Path, max_length: int | None = None) -> Path:
        """Write `tokenizer.json` into `directory` (created if absent), and return its path.

        A tokenizer_config.json with the roles of special tokens, and chat templates, are written too, so that
        transformers' `AutoTokenizer` loads the same tokenizer. max_length: the most tokens of the model, to
        which transformers then truncates with `truncation=True`.
        """
        target = Path(directory) / "tokenizer.json"
        atomic_write(target, self.backend.to_str(pretty=True).encode())
        types = self.backend.encode("", "").type_ids  # only separators: some vocabularies lack every letter
        settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= {f"{role}_token": name for role, name in self.roles.items() if name not in self.symbols}
        extra = [self.token(number) for number in sorted(self.special_ids)]
        if others := [name for name in extra if name not in self.roles.values()]:
            settings["additional_special_tokens"] = others
        if max_length is not None:
            settings["model_max_length"] = max_length
        if self.splits_special:
            settings["split_special_tokens"] = True
        write_templates(self.chat, target.parent)
        names = ["input_ids", *(["token_type_ids"] if 1 in types else []), "attention_mask"]
        write_json(target.with_name("tokenizer_config.json"), {**settings, "model_input_names": names})
        return target

    def fix_special_tokens(self) -> None:
        """State that texts for a model get no special tokens, if the tokenizer does not say which they get.

        Tokens of the tasks of polyformer are otherwise added for a model that was trained here.
        """
        from tokenizers import processors

        if self.backend.post_processor is None:
            self.backend.post_processor = processors.TemplateProcessing(
                single="$A", pair="$A $B:1", special_tokens=[]
            )

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

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of its file's content."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def __len__(self) -> int:
        """Return the size of the vocabulary, including special tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; several texts are encoded in parallel."""
        try:
            encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            check_texts(texts)
            raise
        return [encoding.ids for encoding in encoded]

    def encode_for_model(
        self, text: str, pair: str | None = None, *, language: str | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the ids and token types that the checkpoint's models require, as in transformers' tokenizer.

        The family's special tokens are added ([CLS] text [SEP] pair [SEP]), and their names in the text, such
        as "[MASK]" or "<extra_id_0>", are recognized. `language` ("en") is the language of the text, for
        multilingual models; the default is the language in the files, or English.
        """
        return self.encode_batch_for_model([text], None if pair is None else [pair], language=language)[0]

    def encode_batch_for_model(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, language: str | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Return `encode_for_model` of each text; several texts are encoded in parallel."""
        self.check_pairs(texts, pairs)
        rows = list(texts) if pairs is None else list(zip(texts, pairs))
        try:
            encoded = self.marking.encode_batch_fast(rows)
        except TypeError:
            check_texts([*texts, *(pairs or [])])
            raise
        return self.in_language([(encoding.ids, encoding.type_ids) for encoding in encoded], language)

    def encode_prompt(self, text: str) -> list[int]:
        """Return `encode_for_model` of a text that a decoder continues: without a special token after it."""
        (ids, _), (marks, _) = self.encode_for_model(text), self.encode_for_model("")
        return ids[:-1] if len(ids) > 1 and marks and marks[-1] in (self.eos_id, self.sep_id) else ids

    def encode_chat(self, chat: RenderedChat | str) -> tuple[list[int], list[bool]]:
        """Return the ids of a rendered conversation, and which of them a model learns to write.

        The names of special tokens in the text are these tokens, and no others are added, because a template
        has them. A token is learned if a character of it lies in a span of the template (`RenderedChat`).
        """
        chat = RenderedChat(chat) if isinstance(chat, str) else chat
        check_texts([chat.text])
        encoding = self.marking.encode(chat.text, add_special_tokens=False)
        places = encoding.offsets if chat.spans else [(0, 0)] * len(encoding.ids)
        learned = [any(start < end and stop > first for first, end in chat.spans) for start, stop in places]
        return encoding.ids, learned

    def check_pairs(self, texts: Sequence[str], pairs: Sequence[str] | None) -> None:
        """Raise `InputError` if there is not a second text for each text."""
        if pairs is not None and len(pairs) != len(texts):
            raise InputError(f"pairs: expected one for each of {len(texts)} texts, got {len(pairs)}")

    @cached_property
    def marking(self) -> "tokenizers.Tokenizer":
        """Return the same tokenizer with recognition of special tokens in texts, unless they are split."""
        from polyformer.data.tokenizers.pipelines import from_json

        marking = from_json(self.backend.to_str())
        marking.encode_special_tokens = self.splits_special
        return marking

    @cached_property
    def languages(self) -> dict[str, int]:
        """Return the ids of language tokens, `__en__` and so on; empty for most tokenizers."""
        names = {number: self.token(number) for number in sorted(self.special_ids)}
        return {
            name[2:-2]: number
            for number, name in names.items()
            if name[:2] == name[-2:] == "__" and name[2:-2]
        }

    def in_language(
        self, encoded: list[tuple[list[int], list[int]]], language: str | None
    ) -> list[tuple[list[int], list[int]]]:
        """Return the rows with the token of `language` as their first; unchanged if it is None."""
        if language is None:
            return encoded
        if not self.languages:
            raise InputError(f"language: this tokenizer has no tokens of languages, got {quote(language)}")
        if language not in self.languages:
            raise unknown("language", language, self.languages)
        token, tokens = self.languages[language], {*self.languages.values()}
        return [([token, *ids[1:]] if ids[0] in tokens else ids, types) for ids, types in encoded]

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of `ids`, without special tokens unless kept.

        For bytes and byte-level BPE it is the text that was encoded, in its normal form.
        """
        self._check_ids(ids)
        return self.backend.decode([int(number) for number in ids], skip_special_tokens=not keep_special)

    def token(self, number: int) -> str:
        """Return the name of an id in the vocabulary."""
        self._check_ids([number])
        return self.backend.id_to_token(int(number)) or ""

    def _check_ids(self, ids: Sequence[int]) -> None:
        size = len(self)
        for number in ids:
            beyond = size <= number < 2**32  # possible in a vocabulary with gaps
            if not (0 <= number < size or (beyond and self.backend.id_to_token(int(number)))):
                raise InputError(f"id: expected 0 to {size - 1}, got {number}")


def check_texts(texts: Sequence[object]) -> None:
    """Raise `InputError` if any of them is no text."""
    for text in texts:
        if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"text: expected a string of whole Unicode characters, got {quote(text)}")


def _first(backend: "tokenizers.Tokenizer", names: Sequence[str]) -> str | None:
    return next((name for name in names if backend.token_to_id(name) is not None), None)
