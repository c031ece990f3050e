"""The tokenizer in a checkpoint's directory, with the same ids as in transformers.

tokenizer.json is used if it exists. Otherwise transformers loads the class that tokenizer_config.json or
config.json names. Otherwise the pipeline is built from the vocabulary files.
"""

from pathlib import Path

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from polyformer.core.errors import InputError, quote
from polyformer.core.files import refuse_pickle
from polyformer.core.gguf import gguf_file
from polyformer.core.paths import refuse_links
from polyformer.data.gguf_tokenizer import load_gguf
from polyformer.data.hub_files import HubFiles
from polyformer.data.pipelines import (
    load_bpe,
    load_json,
    load_wordpiece,
    read_vocab,
    reading,
    with_prefix_space,
    with_special,
)
from polyformer.data.sentencepiece import pipeline, read_pieces
from polyformer.data.special_tokens import ROLES
from polyformer.data.tokenizer import Tokenizer
from polyformer.data.transformers_tokenizer import load_through_transformers

PIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model", "spm_char.model")
"""Usual file names of SentencePiece models in checkpoints."""
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
