"""From a command line to the dataclass `Options` of a command; its fields are declared by the functions
here."""

import argparse
import contextlib
import dataclasses
import keyword
import re
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from polyformer.core.destinations import check_file, check_folder, descriptor
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.limits import SIZE
from polyformer.core.parsing import parse_yaml
from polyformer.core.sizes import check_most

DOTTED, BARE, MODEL = r"--[\w-]+(\.[\w-]+)+", r"--[\w.-]+", r"--model(\.[\w-]+)+"
"""Names of settings: those of a recipe have a dot, those of a bench need none."""

METAVARS = {int: "N", float: "X"}
Device = Literal["auto", "cpu", "cuda"]


Output = Literal["file", "folder", "by name"]
"""The kind of place that an option names for output; "by name" where the command decides by the name."""


def argument(
    help: str,
    default: Any = dataclasses.MISSING,
    metavar: str | None = None,
    output: Output | None = None,
) -> Any:
    """Return a positional field: optional if it has a default, with several values if it is a tuple."""
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
    """Return a field given as --name VALUE; a `bool` is a flag, a tuple takes one value or more.

    most: the limit of an `int`.
    """
    metadata = {"help": help, "positional": False, "metavar": metavar, "output": output, "most": most}
    return dataclasses.field(default=default, metadata=metadata)


def device(default: Device | None = "auto") -> Any:
    """The field --device."""
    return option("where to compute (default: auto, which is cuda if there is a GPU, else cpu)", default)


def recipe_settings(example: str) -> Any:
    """A field that collects --SECTION.NAME VALUE as a dict."""
    title = "settings of the recipe", f"--SECTION.NAME VALUE  sets any value of the recipe, such as {example}"
    return dataclasses.field(default_factory=dict, metadata={"settings": DOTTED, "group": title})


def model_settings() -> Any:
    """A field that collects --model.NAME VALUE as a dict, for a command that builds a preset."""
    title = "settings of a preset", "--model.NAME VALUE  sets any option, such as --model.attention linformer"
    return dataclasses.field(default_factory=dict, metadata={"settings": MODEL, "group": title})


def preset_overrides(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` of `model_settings` as overrides of the preset `name`; `InputError` for a directory."""
    if settings and Path(name).is_dir():
        raise InputError(f"--{next(iter(settings))}: sets options of a preset; {name} is a saved model")
    return {option.removeprefix("model."): value for option, value in settings.items()}


def experiment_settings(words: str) -> Any:
    """A field that collects --NAME VALUE ... as a dict, for the command that begins with `words`."""
    title = "settings of the experiment", f"--NAME VALUE ...  {words} --help lists them with their defaults"
    return dataclasses.field(default_factory=dict, metadata={"settings": BARE, "group": title})


def imports() -> Any:
    """A field that collects the names after --import, which every command takes."""
    return dataclasses.field(default=(), metadata={"imports": True})


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """ "100,200", the value of `flag`, as numbers; `InputError` for what are none."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise InputError(f"{flag}: expected numbers with commas between, got {quote(text)}") from error


def parse(name: str, command: ModuleType, argv: list[str]) -> Any:
    """The options of one command from its part of the command line; raises `InputError`, exits for --help."""
    collected: dict[str, Any] = {}
    argv, modules = split_imports(argv)
    for field in dataclasses.fields(command.Options):
        if "imports" in field.metadata:
            collected[field.name] = modules
        if pattern := field.metadata.get("settings"):
            argv, collected[field.name] = split_settings(argv, pattern, several=pattern == BARE)
    try:
        values = vars(parser(name, command, argv).parse_args(argv))
    except argparse.ArgumentError as error:
        raise _readable(error, name, command.Options) from error
    values.pop("import")  # removed from argv before, and in the parser for its help
    values = {field_name(key): tuple(x) if isinstance(x, list) else x for key, x in values.items()}
    for field in dataclasses.fields(command.Options):
        if isinstance(value := values.get(field.name), int):
            check_most(flag(field), value, field.metadata.get("most", SIZE))
    options = command.Options(**values, **collected)
    for name, path in outputs(options, "file").items():
        check_file(path, name)
    for name, path in outputs(options, "folder").items():
        check_folder(path, name)
    return options


def outputs(options: Any, kind: Output) -> dict[str, str]:
    """Return the places of one kind that the options name for output, by the names of the options."""
    fields = [field for field in dataclasses.fields(options) if field.metadata.get("output") == kind]
    values = {word_of(field): getattr(options, field.name) for field in fields}
    return {name: path for name, path in values.items() if path is not None}


def messages_of(options: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that prints to standard error where an option writes a file to standard output."""
    files = {**outputs(options, "file"), **outputs(options, "by name")}
    if 1 in map(descriptor, files.values()):
        return contextlib.redirect_stdout(sys.stderr)
    return contextlib.nullcontext()


def split_imports(argv: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The command line without `--import NAME`, and the names, which are imported now."""
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
    """The command line without the `--name VALUE` pairs whose names match, and their values, read as YAML.

    With `several`, a name takes all values up to the next one: none is true, and more than one are a list.
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
        values = [parse_yaml(text, name, "; put quotes around a text") for text in texts]
        settings[name.removeprefix("--")] = (values[0] if len(values) == 1 else values) if values else True
    return rest, settings


def parser(name: str, command: ModuleType, argv: list[str]) -> Any:
    """The parser of one command; its help includes `details(argv)` where the command has that function."""
    from jsonargparse import ArgumentParser

    assert command.__doc__
    wants_help = any(word in ("-h", "--help") for word in argv)
    details = command.details(argv) if wants_help and hasattr(command, "details") else ""
    result = ArgumentParser(
        prog=f"polyformer {name}",
        description=command.__doc__,
        epilog=f"{details}\n\n{command.EXAMPLES}" if details else command.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(command.Options)
    for field in dataclasses.fields(command.Options):
        if group := field.metadata.get("group"):
            result.add_argument_group(*group)
        elif "imports" not in field.metadata:
            _add(result, field, hints[field.name])
    result.add_argument(
        "--import",
        action="append",
        metavar="FILE",
        help="import a Python file or module with members of your own; may be repeated",
    )
    return result


def _add(parser: Any, field: "dataclasses.Field[Any]", hint: Any) -> None:
    text = field.metadata["help"]
    options: dict[str, Any] = {"metavar": metavar(field, hint)}
    if number := values_of(field, hint):
        options["nargs"] = number
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    if field.default is not dataclasses.MISSING:
        options["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    if hint is bool:
        parser.add_argument(flag(field), action="store_true", help=text)
    else:
        name = field.name if field.metadata["positional"] else flag(field)
        parser.add_argument(name, type=hint, help=text, **options)


def values_of(field: "dataclasses.Field[Any]", hint: Any) -> str | None:
    """Return how many values a field takes, as argparse's `nargs`; None for one."""
    optional = field.metadata["positional"] and field.default is not dataclasses.MISSING
    if typing.get_origin(hint) is tuple:
        return "*" if optional else "+"
    return "?" if optional else None


def metavar(field: "dataclasses.Field[Any]", hint: Any) -> str:
    """What stands for a value in the help: the field's own word, its choices, N, X or its name."""
    words = choices(hint)
    types = [METAVARS[kind] for kind in (hint, *typing.get_args(hint)) if kind in METAVARS]
    if field.metadata["metavar"]:
        return field.metadata["metavar"]
    if words:
        return f"{{{','.join(words)}}}"
    return types[0] if types else field.name.upper()


def choices(hint: Any) -> list[str]:
    """The values of a Literal, or of one among the alternatives of a type."""
    if typing.get_origin(hint) is Literal:
        return [str(value) for value in typing.get_args(hint)]
    return [word for part in typing.get_args(hint) for word in choices(part)]


def place(field: "dataclasses.Field[Any]") -> str:
    """What stands for a positional field in the usage."""
    return field.metadata["metavar"] or field.name.upper()


def word_of(field: "dataclasses.Field[Any]") -> str:
    """Return the name of a field in messages."""
    return place(field) if field.metadata["positional"] else flag(field)


def flag(field: "dataclasses.Field[Any]") -> str:
    """--name of a field."""
    return "--" + field.name.rstrip("_").replace("_", "-")


def field_name(key: str) -> str:
    """The field of an option: one called by a word of Python's has an underscore behind it (`lambda_`)."""
    return f"{key}_" if keyword.iskeyword(key) else key


def _readable(error: argparse.ArgumentError, name: str, options: type[Any]) -> InputError:
    """The parser's error in one line, in the words of the other errors."""
    text = str(error)
    fields = {field.name: field for field in dataclasses.fields(options)}
    hints = typing.get_type_hints(options)
    if stray := re.search(r"unrecognized arguments: (.*)", text, re.DOTALL):
        first = stray.group(1).split()[0]
        if first.startswith("-"):
            flags = [flag(field) for field in fields.values() if not field.metadata.get("positional")]
            return unknown("option", first.partition("=")[0], flags)
        places = " ".join(place(field) for field in fields.values() if field.metadata.get("positional"))
        return InputError(
            f"unexpected {quote(first)}: expected {places or 'nothing'} and options (see polyformer {name} "
            "--help); put quotes around a text of several words"
        )
    if missing := re.search(r'Key "(\w+)" is required|arguments are required: (\S+?),?(\s|$)', text):
        key = missing.group(1) or missing.group(2)
        return InputError(f"{place(fields[key])} is missing; see polyformer {name} --help")
    key = re.search(r'Parser key "(\w+)"', text)
    value = re.search(r"(?:Got value|Given value): (.*)", text)
    if key and value:
        name = field_name(key.group(1))
        field, hint = fields[name], hints[name]
        return InputError(f"{word_of(field)}: expected {_words(hint)}, got {quote(value.group(1).strip())}")
    if alone := re.search(r"argument (--\S+): expected one argument", text):
        return InputError(f"{alone.group(1)}: expected a value after it")
    return InputError(" ".join(text.split()))


def _words(hint: Any) -> str:
    """A type in words: `int | None` as "int", a literal as its choices."""
    alternatives = [part for part in typing.get_args(hint) if part is not type(None)]
    if not alternatives:
        return hint.__name__ if isinstance(hint, type) else repr(hint)
    return " or ".join(map(_words, alternatives))
