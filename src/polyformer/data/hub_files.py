"""Files of a checkpoint's directory that describe its tokenizer: class, special tokens, settings.

tokenizer_config.json        settings, the tokenizer's class, special tokens by role, added tokens by id
special_tokens_map.json      special tokens by role; has priority, as in transformers, unless ids are given
added_tokens.json            tokens added to the vocabulary, with their ids
config.json                  the model's type, which determines the class if no other file names it
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_json
from polyformer.data.special_tokens import ROLES

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
