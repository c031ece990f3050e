"""Configuration: a frozen dataclass for each class, to and from JSON and YAML, strict about names and types.

A *family* is a direct subclass of `Config` (positions, mechanisms, heads, ...); its members are the family's
subclasses that have a `kind`. A field typed with a family is written as `{"kind": ..., ...}`, as an
expression `kind(name=value, ...)`, or as the bare kind if all defaults suffice: in Python, also in
constructors, in files and on the command line alike. The content of a file is checked by name and by type,
never ignored.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.parsing import check_numbers, dump_yaml, parse_json, parse_yaml, with_options
from polyformer.core.ranges import check_ranges, ranges
from polyformer.core.registry import Members, register, register_names

type_hints = functools.cache(typing.get_type_hints)
"""Types of a class's fields, cached, as an expression may have thousands of parts of the same class."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every configuration.

    Class attributes of a member: `kind` is its tag in files, `paper` its source. Of a family: `option`, the
    recipe setting that names a member. `made_by_options`: whether a dotted name (`indexer.top_k`) makes an
    optional part that is absent. The type of a number states its range (`core.ranges`); other checks are in
    `__post_init__`. Both raise `InputError`.
    """

    kind: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    option: ClassVar[str] = ""
    made_by_options: ClassVar[bool] = False
    family: ClassVar[type["Config"]]
    kinds: ClassVar[Members["Config"]]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if Config in cls.__bases__:
            cls.family, cls.kinds = cls, Members()
            if cls.option:
                register_names(f"{_label(cls.option)} member", _sources(cls.kinds), _use(cls.option))
        if "kind" in cls.__dict__ and cls.kind:
            register(cls.family.kinds, cls.kind, cls, "kind")
        if "__post_init__" in cls.__dict__:
            cls.__post_init__ = _after_reading(cls.__dict__["__post_init__"])

    def __post_init__(self) -> None:
        """Decode the parts that are written in a shorter form, `StackConfig(attention="linformer",
        position="rope")`, and check choices and ranges of values.
        """
        for name, hint, choices in _decoded_fields(type(self)):
            value = getattr(self, name)
            if value in choices:  # faster than decoding it
                continue
            part = decode(hint, value, name)
            if part is not value:
                object.__setattr__(self, name, part)
        check_ranges(self)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return small instances for the contract tests; a member with required fields overrides this."""
        return (cls(),)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: numbers, strings, lists and dicts; the kind comes first."""
        fields = {field.name: encode(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"kind": self.kind, **fields} if self.kind else fields

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """Return the configuration that `data` describes; `where` is its dotted path, for messages."""
        name = where or cls.__name__
        data = cls.expanded(data, name)
        if isinstance(data, cls):
            return data
        if not isinstance(data, dict):
            raise InputError(f"{name}: expected {cls.notations()}, got {quote(data)}")
        values = dict(data)
        kind = values.pop("kind", cls.kind)
        if kind != cls.kind:
            if kind not in cls.kinds:
                raise InputError(f"{unknown(f'kind of {name}', kind, cls.kinds)}; expected {cls.notations()}")
            return typing.cast(type[Self], cls.kinds[kind]).from_dict(values, where)
        if cls.kinds and cls is cls.family and not cls.kind:
            raise InputError(f"{name}: expected a 'kind', one of {', '.join(map(repr, sorted(cls.kinds)))}")
        hints = type_hints(cls)
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
                raise InputError(f"{name}: {quote(key)} is missing and has no default")
        prefix = f"{where}." if where else ""
        values = {key: decode(hints[key], value, prefix + key) for key, value in values.items()}
        try:
            return cls(**values)
        except InputError:
            for key, interval in ranges(cls).items():
                interval.check(prefix + key, values.get(key))  # names the whole path
            raise

    @classmethod
    def expanded(cls, data: object, where: str) -> object:
        """Return `data` as a mapping of options if it has a shorter form: a kind, or 'kind(name=value, ...)'.

        A family with other notations adds them here, and to `notations`.
        """
        return with_options(data, where) if isinstance(data, str) and cls.kinds else data

    @classmethod
    def notations(cls) -> str:
        """Return how to write a configuration, for messages."""
        if not cls.kinds:
            return "a mapping of names to values"
        example = min(cls.kinds)
        return (
            f"a kind ('{example}'), one with options ('{example}(name=value)'), "
            f"a mapping ({{kind: {example}, name: value}}) or a {cls.family.__name__}"
        )

    def with_value(self, value: object, where: str) -> "Config | None":
        """Return a copy changed by `value`, if `value` is a mapping without a kind; None if it is a whole
        part.
        """
        if not isinstance(value, dict) or "kind" in value:
            return None
        result: Config = self
        for name, item in value.items():
            result, count = _override(result, str(name).split("."), item, deep=False)
            if not count:
                raise unknown(f"option of {where}", name, [field.name for field in dataclasses.fields(self)])
        return result

    def override(self, name: str, value: object) -> Self:
        """Return a copy with `name` set; a bare name is set in every part of the tree that has it.

        A dotted path is set in a single place; if its first name is not an option of this configuration, in
        every part that has the path. A mapping without a kind changes the existing part.
        """
        path = name.split(".")
        own = {field.name for field in dataclasses.fields(self)}
        changed, count = _override(self, path, value, deep=len(path) == 1 or path[0] not in own)
        if not count:
            raise unknown(f"option of {type(self).__name__}", name, sorted(option_names(self)))
        return typing.cast(Self, changed)

    def to_json(self) -> str:
        """Return `to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_yaml(self) -> str:
        """Return `to_dict` as YAML."""
        return dump_yaml(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the configuration from the output of `to_json`; raises `InputError` as `from_dict` does."""
        return cls.from_dict(parse_json(text, cls.__name__))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Return the configuration from the output of `to_yaml`; raises `InputError` as `from_dict` does."""
        return cls.from_dict(parse_yaml(text, cls.__name__))


def _sources(kinds: Members[Config]) -> Callable[[], dict[str, str]]:
    """Return a function that returns the sources of a family's members by their names."""
    return lambda: {name: member.paper for name, member in kinds.items()}


def _label(option: str) -> str:
    """Return the name of the part that an option sets: "attention" for "model.attention"."""
    return option.removeprefix("model.").removesuffix(".kind")


def _use(option: str) -> str:
    """Return how to select a member, with `{name}` for its name."""
    part, _, argument = option.partition(".")
    python = f' or create_model(..., {argument}="{{name}}")' if part == "model" else ""
    return f"--{option} {{name}}{python}"


def _after_reading(check: Callable[..., None]) -> Callable[..., None]:
    """Return a subclass's `__post_init__`, run after the parts have been decoded and the ranges checked."""

    @functools.wraps(check)
    def read_and_check(self: Config) -> None:
        if type(self).__post_init__ is read_and_check:  # else a subclass calls this, after it has read
            Config.__post_init__(self)
        check(self)

    return read_and_check


@functools.cache
def _decoded_fields(cls: type[Config]) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Return the fields with parts or choices: their names, types and choices."""
    hints = type_hints(cls)
    fields = [(field.name, hints[field.name]) for field in dataclasses.fields(cls)]
    choices = {name: tuple(_choices(hint)) for name, hint in fields}
    return [
        (name, hint, (*choices[name], None) if type(None) in typing.get_args(hint) else choices[name])
        for name, hint in fields
        if choices[name] or _has_part(hint)
    ]


def _choices(hint: Any) -> Iterator[Any]:
    """Yield the values of the Literals in a type."""
    for part in typing.get_args(hint):
        yield from (part,) if typing.get_origin(hint) is typing.Literal else _choices(part)


def _has_part(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        return any(map(_has_part, typing.get_args(hint)))
    return isinstance(hint, type) and (issubclass(hint, Config) or hasattr(hint, "from_text"))


def encode(value: Any) -> Any:
    """Return `value` as data for JSON."""
    if hasattr(value, "to_text"):  # patterns are more readable as expressions
        return value.to_text()
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def decode(hint: Any, value: Any, where: str) -> Any:
    """Return `value` checked against the type `hint` and converted to it."""
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
        if {*arguments} == {int} and isinstance(value, int) and not isinstance(value, bool):
            value = [value] * len(arguments)  # one size for all sides
        if not isinstance(value, list | tuple):
            raise InputError(f"{where}: expected a list, got {quote(value)}")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        if len(value) != len(arguments):
            raise InputError(f"{where}: expected {len(arguments)} values, got {len(value)}: {quote(value)}")
        return tuple(
            decode(argument, item, f"{where}[{i}]")
            for i, (argument, item) in enumerate(zip(arguments, value))
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise InputError(f"{where}: expected a mapping, got {quote(value)}")
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, hint):
        if hint is int and isinstance(value, bool):
            raise InputError(f"{where}: expected int, got {quote(value)}")
        check_numbers(value, where)
        return value
    if hasattr(hint, "from_text") and isinstance(value, str):
        return hint.from_text(value)
    if issubclass(hint, Config):
        return hint.from_dict(value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        check_numbers(value, where)
        return float(value)
    raise InputError(f"{where}: expected {hint.__name__}, got {quote(value)}")


def _decode_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    choices = [choice for choice in arguments if choice is not type(None)]
    errors = []
    for choice in choices:
        try:
            return decode(choice, value, where)
        except InputError as error:
            errors.append(error)
    raise errors[0] if len(errors) == 1 else InputError("; or ".join(map(str, errors)))


def option_names(config: Config) -> set[str]:
    """Return all field names in the tree under `config`."""
    names: set[str] = set()
    for field in dataclasses.fields(config):
        names.add(field.name)
        value = getattr(config, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Config):
                names |= option_names(part)
    return names


def _override(config: Config, path: list[str], value: object, deep: bool) -> tuple[Config, int]:
    """Return `config` with `path` set, if `deep` in every part of the tree that has it, and the number of
    changes.
    """
    hints = type_hints(type(config))
    changes: dict[str, Any] = {}
    count = 0
    for field in dataclasses.fields(config):
        part = getattr(config, field.name)
        if field.name == path[0] and len(path) == 1:
            replaced = part.with_value(value, field.name) if isinstance(part, Config) else None
            changed = decode(hints[field.name], value, field.name) if replaced is None else replaced
            inside = 1
        elif field.name == path[0] and part is None and _is_made_by_options(hints[field.name]):
            changed, inside = decode(hints[field.name], _nested(path[1:], value), field.name), 1
        elif field.name == path[0]:
            changed, inside = _inside(part, path[1:], value, deep=False)
        elif deep:
            changed, inside = _inside(part, path, value, deep=True)
        else:
            continue
        if inside:
            changes[field.name] = changed
            count += inside
    return (dataclasses.replace(config, **changes) if changes else config), count


def _is_made_by_options(hint: Any) -> bool:
    return any(getattr(choice, "made_by_options", False) for choice in typing.get_args(hint))


def _nested(path: list[str], value: object) -> object:
    """Return {a: {b: value}} for the path a.b: an optional part that a configuration does not have yet."""
    for name in reversed(path):
        value = {name: value}
    return value


def _inside(part: Any, path: list[str], value: object, deep: bool) -> tuple[Any, int]:
    """Return the same for a field's value: one part, or a tuple of parts, all of them changed."""
    if isinstance(part, Config):
        return _override(part, path, value, deep)
    if isinstance(part, tuple):
        each = [_inside(item, path, value, deep) for item in part]
        return tuple(item for item, _ in each), sum(count for _, count in each)
    return part, 0
