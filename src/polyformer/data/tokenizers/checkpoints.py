"""Tokenizers of checkpoints: their files, with the same ids as in transformers.

These files of a checkpoint's directory describe its tokenizer:

tokenizer_config.json        settings, the tokenizer's class, special tokens by role, added tokens by id
special_tokens_map.json      special tokens by role; has priority, as in transformers, unless ids are given
added_tokens.json            tokens added to the vocabulary, with their ids
config.json                  the model's type, which determines the class if no other file names it

tokenizer.json is used if it exists. Otherwise transformers loads the
class that tokenizer_config.json or config.json names. Otherwise the pipeline is built from the vocabulary
files.

Most of transformers' classes wrap a pipeline of the `tokenizers` library, which `Tokenizer` uses directly, so
that it is saved as a tokenizer.json. The classes that are written in Python (CTRL, XLM, M2M-100) are wrapped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_json, refuse_pickle
from polyformer.core.foreign_checkpoints import gguf_file, load_by_transformers
from polyformer.core.imports import needs_extra
from polyformer.core.paths import refuse_links
from polyformer.data.chat import RenderedChat, of_folder
from polyformer.data.tokenizers.model_files import load_gguf, pipeline, read_pieces
from polyformer.data.tokenizers.pipelines import (
    load_bpe,
    load_json,
    load_wordpiece,
    read_vocab,
    reading,
    with_prefix_space,
    with_special,
)
from polyformer.data.tokenizers.special_tokens import ROLES
from polyformer.data.tokenizers.tokenizer import PIECE_FILES, Tokenizer, check_texts

NEUTRAL = ("PreTrainedTokenizer", "TokenizersBackend")  # they say nothing of the kind of tokenizer


@dataclass(frozen=True)
class HubFiles:
    """A directory in the hub's layout; every property reads its files once."""

    folder: Path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return tokenizer_config.json."""
        return self._table("tokenizer_config.json")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return names that may identify the kind of tokenizer: classes, then the model's type."""
        config = self._table("config.json")
        classes = (
            self.settings.get("tokenizer_class"),
            config.get("tokenizer_class"),
            config.get("model_type"),
        )
        names = (name.removesuffix("Fast") for name in classes if isinstance(name, str))
        return tuple(name for name in names if name not in NEUTRAL)

    @cached_property
    def add_prefix_space(self) -> bool | None:
        """Return whether a text begins with a space; None if tokenizer.json determines it.

        As in transformers, the setting belongs to the classes of families, not to `PreTrainedTokenizerFast`.
        """
        stated = self.settings.get("tokenizer_class")
        value = self.settings.get("add_prefix_space")
        neutral = isinstance(stated, str) and stated.removesuffix("Fast") in NEUTRAL
        return value if isinstance(value, bool) and self.names and not neutral else None

    @cached_property
    def roles(self) -> dict[str, AddedToken | None]:
        """Return the special token of each role in the files; None if a file states that there is none."""
        settings = self._merged
        known = {token.content: token for token in self.by_id.values()}
        contents = {role: settings[f"{role}_token"] for role in ROLES if f"{role}_token" in settings}
        tokens = {
            role: None if value is None else _token(value, special=True) for role, value in contents.items()
        }
        return {role: token and known.get(token.content, token) for role, token in tokens.items()}

    @cached_property
    def extra(self) -> list[AddedToken]:
        """Return the special tokens without a role."""
        settings = self._merged
        listed = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
        values = listed.values() if isinstance(listed, dict) else listed
        return [_token(value, special=True) for value in values]

    @cached_property
    def by_id(self) -> dict[int, AddedToken]:
        """Return the tokens with ids in the files."""
        decoder = self.settings.get("added_tokens_decoder") or {}
        tokens = {int(number): _token(value, special=False) for number, value in decoder.items()}
        if decoder:
            return tokens
        named = [self._merged.get(f"{role}_token") for role in ROLES]
        special = {_token(value, special=True).content for value in named if value} | {
            token.content for token in self.extra
        }
        for name, number in self._table("added_tokens.json").items():
            tokens[number] = AddedToken(name, special=name in special, normalized=name not in special)
        return tokens

    @cached_property
    def _merged(self) -> dict[str, Any]:
        given_by_id = self.settings.get("added_tokens_decoder")
        return {**self.settings, **({} if given_by_id else self._table("special_tokens_map.json"))}

    def _table(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_json(path, dict) if path.is_file() else {}


def _token(value: Any, *, special: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=False)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(
            f"special token: expected a string or an object with its content, got {quote(value)}"
        )
    flags = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(value["content"], special=special or bool(value.get("special")), **flags)


def load_through_transformers(files: HubFiles, lowercase: bool | None = None) -> Tokenizer:
    """Load the tokenizer of a directory by `AutoTokenizer`; `lowercase` overrides the directory's setting."""
    roles = {role: token and token.content for role, token in files.roles.items()}
    _check_files(files)
    options = {} if lowercase is None else {"do_lower_case": lowercase}
    loaded = load_by_transformers("AutoTokenizer", files.folder, local_files_only=True, **options)
    roles |= {role: name for role in ROLES if (name := getattr(loaded, f"{role}_token", None))}
    if loaded.is_fast:
        backend = loaded.backend_tokenizer
        if (
            isinstance(backend.model, models.WordPiece)
            and backend.token_to_id(backend.model.unk_token) is None
        ):
            raise InputError(
                f"{files.folder}: its vocabulary lacks the unknown token {backend.model.unk_token}"
            )
        return Tokenizer(backend, roles=roles)
    return PythonTokenizer(loaded, roles=roles)


def _check_files(files: HubFiles) -> None:
    """Raise `InputError` for an unknown class and for a missing vocabulary.

    In both cases transformers may return a tokenizer with an empty vocabulary.
    """
    reason = f"{files.folder}: a tokenizer without a tokenizer.json needs transformers to be read"
    with needs_extra("hub", reason):
        from transformers.models.auto import tokenization_auto as auto
    names = [auto.TOKENIZER_MAPPING_NAMES.get(name) or name for name in files.names]
    kind = auto.tokenizer_class_from_name(names[0])
    if kind is None:
        raise InputError(
            f"{files.folder}: transformers has no tokenizer {names[0]}; save it as tokenizer.json"
        )
    for role, name in kind.vocab_files_names.items():
        if role in ("vocab_file", "merges_file", "spm_file") and not (files.folder / name).is_file():
            raise InputError(f"{files.folder}: no {name} in it, which {kind.__name__} needs")


class PythonTokenizer(Tokenizer):
    """A tokenizer that transformers implements in Python; `backend` contains only its vocabulary."""

    def __init__(self, loaded: Any, roles: dict[str, str | None]):
        vocab = loaded.get_vocab()
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=loaded.unk_token))
        special = [loaded.convert_ids_to_tokens(number) for number in sorted({*loaded.all_special_ids})]
        super().__init__(with_special(backend, special), roles=roles)
        self.loaded = loaded

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        check_texts(texts)
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return [self.loaded(text, **options)["input_ids"] for text in texts]

    def encode_chat(self, chat: RenderedChat | str) -> tuple[list[int], list[bool]]:
        """Return the ids of a rendered conversation; Python's tokenizers have no characters of tokens."""
        text, spans = (chat, ()) if isinstance(chat, str) else (chat.text, chat.spans)
        check_texts([text])
        if spans:
            raise InputError(
                "chat: a tokenizer in Python has no places of its tokens in a text; save it as tokenizer.json"
            )
        ids = self.loaded(text, add_special_tokens=False)["input_ids"]
        return ids, [False] * len(ids)

    def encode_batch_for_model(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, language: str | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Return ids and token types with the family's special tokens around each text or pair."""
        self.check_pairs(texts, pairs)
        check_texts([*texts, *(pairs or [])])
        rows = zip(texts) if pairs is None else zip(texts, pairs)
        encoded = [self.loaded(*row, return_token_type_ids=True) for row in rows]
        return self.in_language([(row["input_ids"], row["token_type_ids"]) for row in encoded], language)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of the ids, as transformers writes it."""
        self._check_ids(ids)
        return self.loaded.decode([int(number) for number in ids], skip_special_tokens=not keep_special)

    def save(self, directory: str | Path) -> Path:
        """Write the files of transformers' class; return the path of its tokenizer_config.json."""
        self.loaded.save_pretrained(directory)
        return Path(directory) / "tokenizer_config.json"


_VOCABULARIES = ("vocab.txt", "vocab.json", *PIECE_FILES)
PICKLE_FIX = "load the tokenizer where you trust it and save it as tokenizer.json"
_PICKLES = ("vocab.pkl", "vocab.bin", "tokenizer.pkl")


def load(path: Path, *, merges: Path | None = None, lowercase: bool | None = None) -> Tokenizer:
    """Load the tokenizer in a directory, in a GGUF file, or in another single file."""
    if not path.exists():
        raise InputError(
            f"{path}: no such tokenizer; expected a tokenizer.json, a vocab.txt or a directory with one"
        )
    refuse_links(path)
    file = None if (path / "tokenizer.json").is_file() else gguf_file(path)
    if file is not None:
        return load_gguf(file)
    if path.is_dir() and merges is None:
        with reading(path):
            files = HubFiles(path)
            tokenizer = load_directory(files, lowercase)
            tokenizer.splits_special = files.settings.get("split_special_tokens") is True
            tokenizer.chat = of_folder(path, files.settings, tokenizer.roles)
            return tokenizer
    path = path / "vocab.json" if path.is_dir() else path
    return Tokenizer(_load_file(path, merges, lowercase))


def _load_file(path: Path, merges: Path | None, lowercase: bool | None) -> tokenizers.Tokenizer:
    refuse_pickle(path, PICKLE_FIX)
    if path.suffix == ".txt":
        return load_wordpiece(path, lowercase)
    if path.suffix == ".model":
        return pipeline(read_pieces(path))
    if merges is not None or path.name == "vocab.json":
        return load_bpe(path, merges or path.with_name("merges.txt"))
    return load_json(path)


def load_directory(files: HubFiles, lowercase: bool | None) -> Tokenizer:
    """Load the tokenizer of a directory; raises `InputError` if it has none or a damaged file."""
    if (files.folder / "tokenizer.json").is_file():
        backend = _load_file(files.folder / "tokenizer.json", None, lowercase)
        if files.add_prefix_space is not None:
            backend = with_prefix_space(backend, files.add_prefix_space)
        return _with_special_tokens(files, backend)
    vocabularies = [path for name in _VOCABULARIES if (path := files.folder / name).is_file()]
    for path in vocabularies or [path for name in _PICKLES if (path := files.folder / name).is_file()]:
        refuse_pickle(path, PICKLE_FIX)
        if path.name == "vocab.json":
            read_vocab(path)
    if {"TransfoXLTokenizer", "transfo-xl"} & {*files.names}:
        return _with_special_tokens(files, _words(files))
    if files.names:
        tokenizer = load_through_transformers(files, lowercase)
        _check_ids(files, tokenizer.backend)
        return tokenizer
    if not vocabularies:
        raise InputError(
            f"{files.folder}: no tokenizer in this directory; expected one of tokenizer.json, "
            f"{', '.join(_VOCABULARIES)} in it"
        )
    lowercase = files.settings.get("do_lower_case") if lowercase is None else lowercase
    return _with_special_tokens(files, _load_file(vocabularies[0], None, lowercase))


def _words(files: HubFiles) -> tokenizers.Tokenizer:
    """Build Transformer-XL's tokenizer of words between spaces, as in WikiText-103.

    transformers no longer has it. Other texts are not split into such words here. vocab.txt has a word per
    line; most of the vocabularies are pickles, which are refused.
    """
    path = files.folder / "vocab.txt"
    if not path.is_file():
        raise InputError(f"{files.folder}: no vocab.txt in it, which a tokenizer of words needs")
    words = [line.split()[0] for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    if "<unk>" not in words:
        raise InputError(f"{path}: no <unk> in it, the token of words outside the vocabulary")
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if files.settings.get("lower_case"):
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_special(backend, ("<eos>", "<unk>"))


def _with_special_tokens(files: HubFiles, backend: tokenizers.Tokenizer) -> Tokenizer:
    """Return the tokenizer with the special tokens that its files name."""
    by_id = [files.by_id[number] for number in sorted(files.by_id)]
    named = [token for role in ROLES if (token := files.roles.get(role))]
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in [*by_id, *named, *files.extra]:
        if token.content not in added:
            added.add(token.content)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    _check_ids(files, backend)
    roles = {role: token and token.content for role, token in files.roles.items()}
    if isinstance(backend.model, models.WordPiece) and backend.post_processor is None:
        _mark_as_bert(backend, roles)
    return Tokenizer(backend, roles=roles)


def _check_ids(files: HubFiles, backend: tokenizers.Tokenizer) -> None:
    for number, token in files.by_id.items():
        if backend.token_to_id(token.content) != number:
            raise InputError(
                f"{files.folder}: {quote(token.content)} should have the id {number}, but its files give "
                f"{backend.token_to_id(token.content)}"
            )


def _mark_as_bert(backend: tokenizers.Tokenizer, roles: dict[str, str | None]) -> None:
    """Encode for a model as "[CLS] A [SEP] B [SEP]" with token types, unless a token is missing."""
    start, end = roles.get("cls", "[CLS]"), roles.get("sep", "[SEP]")
    ids = [(name, backend.token_to_id(name)) for name in (start, end) if name]
    if len(ids) == 2 and None not in dict(ids).values():
        backend.post_processor = processors.TemplateProcessing(
            single=f"{start} $A {end}", pair=f"{start} $A {end} $B:1 {end}:1", special_tokens=ids
        )
