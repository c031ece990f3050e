"""Tokenizers that transformers loads: those of checkpoints without a tokenizer.json.

Most of transformers' classes wrap a pipeline of the `tokenizers` library, which `Tokenizer` uses directly, so
that it is saved as a tokenizer.json. The classes that are written in Python (CTRL, XLM, M2M-100) are wrapped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from polyformer.core.errors import InputError
from polyformer.core.optional_packages import needs_extra
from polyformer.core.transformers_loading import load_by_transformers
from polyformer.data.hub_files import HubFiles
from polyformer.data.pipelines import with_special
from polyformer.data.special_tokens import ROLES
from polyformer.data.tokenizer import Tokenizer, check_texts


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
        """Return the ids of each text."""
        check_texts(texts)
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return [self.loaded(text, **options)["input_ids"] for text in texts]

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
