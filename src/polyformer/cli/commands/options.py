"""Parse a command line into the dataclass of a command's options.

The fields of the dataclass are declared with `argument`, `option` and the other functions of this module.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import re
import sys
import types
import typing
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from annotated_types import Le

from polyformer.cli.commands import Command, options_class
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.parsing import parse_yaml
from polyformer.core.paths import check_file, check_folder, descriptor
from polyformer.core.ranges import SIZE, check_range, ranges

DOTTED, BARE, MODEL, DATA = r"--[\w-]+(\.[\w-]+)+", r"--[\w.-]+", r"--model(\.[\w-]+)+", r"--data(\.[\w-]+)+"
"""Patterns of setting names: a recipe's settings contain a dot, a bench's need not."""

METAVARS = {int: "N", float: "X"}
Device = Literal["auto", "cpu", "cuda"]


Output = Literal["file", "folder", "by name"]
"""Kind of output that an option names; "by name" if the command decides by the name's suffix."""


def argument(
    help: str, default: Any = dataclasses.MISSING, metavar: str | None = None, output: Output | None = None
) -> Any:
    """Declare a positional argument: optional if it has a default, with several values if it is a tuple."""
    metadata = {"help": help, "positional": True, "metavar": metavar, "output": output}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option(
    help: str,
    default: Any = None,
    metavar: str | None = None,
    output: Output | None = None,
    most: int = SIZE,
) -> Any:
    """Declare an option --name VALUE; a `bool` is a flag, a tuple takes one or more values.

    most: the largest accepted `int`.
    """
    metadata = {"help": help, "positional": False, "metavar": metavar, "output": output}
    metadata |= {"most": most}
    return dataclasses.field(default=default, metadata=metadata)


def device(default: Device | None = "auto") -> Any:
    """Declare the option --device."""
    return option("device to compute on (default: auto, which is cuda if there is a GPU, else cpu)", default)


def settings(pattern: str, title: str, text: str) -> Any:
    """Declare a field that collects the settings with names of a pattern as a dict; text: for the help."""
    return dataclasses.field(default_factory=dict, metadata={"settings": pattern, "group": (title, text)})


def recipe_settings(example: str) -> Any:
    """Declare a field that collects --SECTION.NAME VALUE."""
    text = f"--SECTION.NAME VALUE  sets any value of the recipe, for example {example}"
    return settings(DOTTED, "recipe settings", text)


def model_settings() -> Any:
    """Declare a field that collects --model.NAME VALUE, for a command that builds a preset."""
    text = "--model.NAME VALUE  sets any option, for example --model.attention linformer"
    return settings(MODEL, "preset settings", text)


def data_settings() -> Any:
    """Declare a field that collects --data.NAME VALUE, for a command that reads data like a run."""
    text = "--data.NAME VALUE  changes how the data are read, for example --data.header '[text, label]'"
    return settings(DATA, "data settings", text)


def preset_overrides(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` as overrides of the preset `name`; raise `InputError` if it is a directory."""
    if settings and Path(name).is_dir():
        raise InputError(f"--{next(iter(settings))}: only presets have settings, and {name} is a saved model")
    return {option.removeprefix("model."): value for option, value in settings.items()}


def imports() -> Any:
    """Declare a field that collects the names after --import, an option of every command."""
    return dataclasses.field(default=(), metadata={"imports": True})


def parse_numbers(flag: str, text: str) -> tuple[float, ...]:
    """Return the numbers in `text`, such as "100,200"; an `InputError` names `flag`."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise InputError(f"{flag}: expected numbers separated by commas, got {quote(text)}") from error


def parse_lengths(text: str) -> list[int]:
    """Return the sorted lengths in `text`, the value of --lengths; raise `InputError` for other numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise InputError(f"--lengths: expected numbers above 1, for example 512,2048, got {quote(text)}")
    for part in parts:
        check_range("--lengths", int(part), Le(SIZE))
    return sorted({int(part) for part in parts})


def parse(name: str, command: Command, argv: list[str]) -> Any:
    """Return the options in the arguments of a command; raise `InputError`, or exit after --help."""
    collected: dict[str, Any] = {}
    argv, modules = split_imports(argv)
    cls = options_class(command)
    for field in dataclasses.fields(cls):
        if "imports" in field.metadata:
            collected[field.name] = modules
        if pattern := field.metadata.get("settings"):
            argv, collected[field.name] = split_settings(argv, pattern, several=pattern == BARE)
    if {"-h", "--help"} & set(itertools.takewhile(lambda word: word != "--", argv)):
        parser(name, command, argv).print_help()
        raise SystemExit(0)
    values = _values(name, cls, argv)
    for field in dataclasses.fields(cls):
        if isinstance(value := values.get(field.name), int):
            check_range(flag(field), value, Le(field.metadata.get("most", SIZE)))
        if field.name in ranges(cls):
            ranges(cls)[field.name].check(display_name(field), value)
    options = cls(**values, **collected)
    for name, path in output_paths(options, "file").items():
        check_file(path, name)
    for name, path in output_paths(options, "folder").items():
        check_folder(path, name)
    return options


def output_paths(options: Any, kind: Output) -> dict[str, str]:
    """Return the output paths of one kind, by the names of their options."""
    fields = [field for field in dataclasses.fields(options) if field.metadata.get("output") == kind]
    values = {display_name(field): getattr(options, field.name) for field in fields}
    return {name: path for name, path in values.items() if path is not None}


def redirected_messages(options: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that prints to standard error if an option writes a file to standard output."""
    files = {**output_paths(options, "file"), **output_paths(options, "by name")}
    if 1 in map(descriptor, files.values()):
        return contextlib.redirect_stdout(sys.stderr)
    return contextlib.nullcontext()


def split_imports(argv: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Import the modules after `--import`; return the remaining arguments and the modules' names."""
    rest: list[str] = []
    names: list[str] = []
    words = list(argv)
    while words:
        flag, equals, value = (word := words.pop(0)).partition("=")
        if flag != "--import":
            rest.append(word)
        elif not equals and not words:
            raise InputError("--import: expected a file or a module after it")
        else:
            names.append(value if equals else words.pop(0))
    if names:
        from polyformer.models.plugins import import_named

        for name in names:
            import_named(name)
    return rest, tuple(names)


def split_settings(argv: list[str], pattern: str, several: bool = False) -> tuple[list[str], dict[str, Any]]:
    """Split the `--name VALUE` pairs that match `pattern` from `argv`; return the rest and the YAML values.

    With `several`, a name takes all values up to the next name: no value means true, several are a list.
    """
    rest: list[str] = []
    settings: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not re.fullmatch(pattern, name) or name in ("-h", "--help"):
            rest.append(word)
            continue
        texts = [value] if equals else []
        while not equals and words and not words[0].startswith("--") and (several or not texts):
            texts.append(words.pop(0))
        if not texts and not several:
            raise InputError(f"{name}: expected a value after it")
        values = [parse_yaml(text, name, "; put quotes around a string") for text in texts]
        settings[name.removeprefix("--")] = (values[0] if len(values) == 1 else values) if values else True
    return rest, settings


def _values(name: str, cls: type[Any], argv: list[str]) -> dict[str, Any]:
    """Return the values in `argv` by the names of their fields.

    Positional arguments may stand before, between and after options; all words after "--" are positional.
    """
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if "help" in field.metadata]
    options = {flag(field): field for field in fields if not field.metadata["positional"]}
    values: dict[str, Any] = {}
    places: list[str] = []
    words = list(argv)
    while words and (word := words.pop(0)) != "--":
        start, equals, value = word.partition("=")
        if start in options:
            field = options[start]
            texts = [value] if equals else _take(words, hints[field.name])
            values[field.name] = _value(field, hints[field.name], texts)
        elif _is_option(word):
            raise unknown("option", start, options)
        else:
            places.append(word)
    positional = [field for field in fields if field.metadata["positional"]]
    greedy = [option for option in options if option in argv and _is_tuple(hints[options[option].name])]
    return values | _positional_values(name, positional, hints, [*places, *words], greedy)


def _take(words: list[str], hint: Any) -> list[str]:
    """Remove the words of an option's value from the start of `words` and return them."""
    count = len(words) if _is_tuple(hint) else int(hint is not bool)
    texts = list(itertools.takewhile(lambda word: not _is_option(word), words[:count]))
    del words[: len(texts)]
    return texts


def _positional_values(
    name: str,
    fields: list["dataclasses.Field[Any]"],
    hints: dict[str, Any],
    places: list[str],
    greedy: list[str],
) -> dict[str, Any]:
    """Return the values of positional arguments; those that may be absent leave enough words for the others.

    greedy: the options with several values, which may have taken the words of a missing argument.
    """
    values: dict[str, Any] = {}
    rest = list(places)
    for number, field in enumerate(fields):
        hint, required = hints[field.name], field.default is dataclasses.MISSING
        spare = len(rest) - sum(later.default is dataclasses.MISSING for later in fields[number + 1 :])
        count = max(spare if _is_tuple(hint) else min(spare, 1), int(required))
        texts, rest = rest[:count], rest[count:]
        if texts:
            values[field.name] = _value(field, hint, texts)
        elif required:
            way = "".join(
                f"; put it before {option}, which takes all the values after it" for option in greedy
            )
            raise InputError(f"{positional_name(field)} is missing{way}; see polyformer {name} --help")
    if rest:
        expected = " ".join(map(positional_name, fields)) or "nothing"
        raise InputError(
            f"unexpected {quote(rest[0])}: expected {expected} and options (see polyformer {name} "
            "--help); put quotes around a text of several words"
        )
    return values


def _value(field: "dataclasses.Field[Any]", hint: Any, texts: list[str]) -> Any:
    """Return the words of a field as a value of its type; raise `InputError` that names the field."""
    if hint is bool:
        if texts:
            raise InputError(f"{flag(field)}: expected no value after it, got {quote(texts[0])}")
        return True
    if not texts:
        raise InputError(f"{flag(field)}: expected a value after it")
    if _is_tuple(hint):
        return tuple(_converted(field, typing.get_args(hint)[0], text) for text in texts)
    return _converted(field, hint, texts[0])


def _converted(field: "dataclasses.Field[Any]", hint: Any, text: str) -> Any:
    """Return a word as a value of a type: a number, a text, or a choice of a Literal."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for kind in typing.get_args(hint) if is_union else (hint,):
        if typing.get_origin(kind) is Literal and text in typing.get_args(kind):
            return text
        if kind in (int, float, str):
            with contextlib.suppress(ValueError):
                value = kind(text)
                if kind is not float or math.isfinite(float(value)):
                    return value
    raise InputError(f"{display_name(field)}: expected {_type_name(hint)}, got {quote(text)}")


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _is_option(word: str) -> bool:
    """Return whether argparse takes `word` for an option; negative numbers and texts with spaces are not."""
    return word == "--" or re.fullmatch(r"-[^\s\d.]\S*", word) is not None


def parser(name: str, command: Command, argv: list[str]) -> argparse.ArgumentParser:
    """Return a parser that prints the help of a command, with its details, if any."""
    details = "" if command.details is None else command.details(argv)
    result = argparse.ArgumentParser(
        prog=f"polyformer {name}",
        description=command.help,
        epilog=f"{details}\n\n{command.examples}" if details else command.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cls = options_class(command)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if group := field.metadata.get("group"):
            result.add_argument_group(*group)
        elif "imports" not in field.metadata:
            add_argument(result, field, hints[field.name])
    result.add_argument(
        "--import",
        action="append",
        metavar="FILE",
        help="import a Python file or module that registers your own classes; may be repeated",
    )
    return result


def add_argument(
    parser: argparse.ArgumentParser,
    field: "dataclasses.Field[Any]",
    hint: Any,
    words: list[str] | None = None,
) -> argparse.Action:
    """Add a field to a parser that prints help or completes commands; `words`: the choices for its value."""
    options: dict[str, Any] = {"help": field.metadata["help"].replace("%", "%%")}
    if hint is bool:
        return parser.add_argument(flag(field), action="store_true", **options)
    if number := nargs(field, hint):
        options["nargs"] = number
    name = field.name if field.metadata["positional"] else flag(field)
    return parser.add_argument(name, metavar=metavar(field, hint), choices=words, **options)


def nargs(field: "dataclasses.Field[Any]", hint: Any) -> str | None:
    """Return the number of values of a field as argparse's `nargs`; None for a single value."""
    optional = field.metadata["positional"] and field.default is not dataclasses.MISSING
    if _is_tuple(hint):
        return "*" if optional else "+"
    return "?" if optional else None


def metavar(field: "dataclasses.Field[Any]", hint: Any) -> str:
    """Return the placeholder of a value in the help: the field's metavar, its choices, N, X or its name."""
    words = choices(hint)
    types = [METAVARS[kind] for kind in (hint, *typing.get_args(hint)) if kind in METAVARS]
    if field.metadata["metavar"]:
        return field.metadata["metavar"]
    if words:
        return f"{{{','.join(words)}}}"
    return types[0] if types else field.name.upper()


def choices(hint: Any) -> list[str]:
    """Return the values of a Literal, or of the Literals in a union."""
    if typing.get_origin(hint) is Literal:
        return [str(value) for value in typing.get_args(hint)]
    return [word for part in typing.get_args(hint) for word in choices(part)]


def positional_name(field: "dataclasses.Field[Any]") -> str:
    """Return the name of a positional argument in the usage line."""
    return field.metadata["metavar"] or field.name.upper()


def display_name(field: "dataclasses.Field[Any]") -> str:
    """Return the name of a field in messages."""
    return positional_name(field) if field.metadata["positional"] else flag(field)


def flag(field: "dataclasses.Field[Any]") -> str:
    """Return the command-line option of a field, --name."""
    return "--" + field.name.rstrip("_").replace("_", "-")


def set_options(options: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of these options that are set, by their names."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def refuse(options: Any, names: Collection[str], why: str) -> None:
    """Raise `InputError`, "--name: why", for the first of these options that is set."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in names and value is not None and value is not False:
            raise InputError(f"{display_name(field)}: {why}")


def _type_name(hint: Any) -> str:
    """Return the name of a type: "int" for `int | None`, the choices for a Literal."""
    alternatives = [part for part in typing.get_args(hint) if part is not type(None)]
    if not alternatives:
        return hint.__name__ if isinstance(hint, type) else repr(hint)
    return " or ".join(map(_type_name, alternatives))
