"""Configuration: a frozen dataclass beside each class, JSON and YAML both ways, strict about names and types.

A *family* is a direct subclass of `Config` (positions, mechanisms, heads, ...); its members are the family's
subclasses that have a `kind`. A field typed with a family is written as `{"kind": ..., ...}`, or as the bare
kind when every default will do. What stands in a file is checked by name and by type, never ignored.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, ClassVar, Self

from polyformer.core.errors import InputError, unknown
from polyformer.core.parsing import check_numbers, dump_yaml, parse_json, parse_yaml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every configuration.

    Class attributes of a member: `kind` its tag in files; `row` its row in the table of members;
    `paper` where it comes from. Checks stand in `__post_init__` and raise `InputError`.
    """

    kind: ClassVar[str] = ""
    row: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    family: ClassVar[type["Config"]]
    kinds: ClassVar[dict[str, type["Config"]]]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if Config in cls.__bases__:
            cls.family, cls.kinds = cls, {}
        if "kind" in cls.__dict__ and cls.kind:
            cls.family.kinds[cls.kind] = cls

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Small instances that the contract tests run; a member with required fields overrides it."""
        return (cls(),)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: numbers, strings, lists and dicts; the kind comes first."""
        fields = {field.name: encode(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"kind": self.kind, **fields} if self.kind else fields

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """The configuration that `data` describes; `where` is its dotted path, for messages."""
        name = where or cls.__name__
        if isinstance(data, str) and cls.kinds:
            data = {"kind": data}
        if not isinstance(data, dict):
            raise InputError(f"{name}: expected a mapping of names to values, got {data!r}")
        values = dict(data)
        kind = values.pop("kind", cls.kind)
        if kind != cls.kind:
            if kind not in list(cls.kinds):  # a list, because the kind in a file may be anything
                raise unknown(f"kind of {name}", kind, cls.kinds)
            return typing.cast(type[Self], cls.kinds[kind]).from_dict(values, where)
        if cls.kinds and cls is cls.family and not cls.kind:
            raise InputError(f"{name}: expected a 'kind', one of {', '.join(map(repr, sorted(cls.kinds)))}")
        hints = typing.get_type_hints(cls)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key in values:
            if key not in fields:
                raise unknown(f"option of {name}", key, fields)
        for key, field in fields.items():
            if (
                key not in values
                and field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ):
                raise InputError(f"{name}: {key!r} is missing and has no default")
        prefix = f"{where}." if where else ""
        return cls(**{key: decode(hints[key], value, prefix + key) for key, value in values.items()})

    def override(self, name: str, value: object) -> Self:
        """A copy with `name` set: a bare name wherever it occurs in the tree, a dotted path in one place."""
        changed, count = _override(self, name.split("."), value, deep="." not in name)
        if not count:
            raise unknown(f"option of {type(self).__name__}", name, sorted(option_names(self)))
        return typing.cast(Self, changed)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_yaml(self) -> str:
        return dump_yaml(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(parse_json(text, cls.__name__))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        return cls.from_dict(parse_yaml(text, cls.__name__))


def encode(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if hasattr(value, "to_text"):  # what reads better as an expression: patterns
        return value.to_text()
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def decode(hint: Any, value: Any, where: str) -> Any:
    """`value` checked against the type `hint` and made into it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise unknown(where, value, map(str, arguments))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{where}: expected a list, got {value!r}")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        if len(value) != len(arguments):
            raise InputError(f"{where}: expected {len(arguments)} values, got {len(value)}: {value!r}")
        return tuple(
            decode(one, item, f"{where}[{i}]") for i, (one, item) in enumerate(zip(arguments, value))
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise InputError(f"{where}: expected a mapping, got {value!r}")
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, hint):
        if hint is int and isinstance(value, bool):
            raise InputError(f"{where}: expected int, got {value!r}")
        check_numbers(value, where)
        return value
    if hasattr(hint, "from_text") and isinstance(value, str):
        return hint.from_text(value)
    if issubclass(hint, Config):
        return hint.from_dict(value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    raise InputError(f"{where}: expected {hint.__name__}, got {value!r}")


def _decode_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    choices = [one for one in arguments if one is not type(None)]
    errors = []
    for one in choices:
        try:
            return decode(one, value, where)
        except InputError as error:
            errors.append(error)
    raise errors[0] if len(errors) == 1 else InputError("; or ".join(map(str, errors)))


def option_names(config: Config) -> set[str]:
    """Every field name in the tree under `config`."""
    names: set[str] = set()
    for field in dataclasses.fields(config):
        names.add(field.name)
        value = getattr(config, field.name)
        if isinstance(value, Config):
            names |= option_names(value)
    return names


def _override(config: Config, path: list[str], value: object, deep: bool) -> tuple[Config, int]:
    """`config` with `path` set, if `deep` in every part of the tree that has it; and how many were set."""
    hints = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    count = 0
    for field in dataclasses.fields(config):
        part = getattr(config, field.name)
        if field.name == path[0] and len(path) == 1:
            changes[field.name] = decode(hints[field.name], value, field.name)
            count += 1
        elif isinstance(part, Config) and (deep or field.name == path[0]):
            changed, inside = _override(part, path if deep else path[1:], value, deep)
            if inside:
                changes[field.name] = changed
                count += inside
    return (dataclasses.replace(config, **changes) if changes else config), count
