"""From a command line to the dataclass `Options` of a command; its fields are declared by the functions
here."""

import argparse
import dataclasses
import importlib
import keyword
import re
import typing
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.parsing import parse_yaml

DOTTED, BARE, MODEL = r"--[\w-]+(\.[\w-]+)+", r"--[\w.-]+", r"--model(\.[\w-]+)+"
"""Names of settings: those of a recipe have a dot, those of a bench need none."""

METAVARS = {int: "N", float: "X"}
Device = Literal["auto", "cpu", "cuda"]


def argument(help: str, default: Any = dataclasses.MISSING, metavar: str | None = None) -> Any:
    """A positional field; it is optional if it has a default, and takes several values if it is a tuple."""
    metadata = {"help": help, "positional": True, "metavar": metavar}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option(help: str, default: Any = None, metavar: str | None = None) -> Any:
    """A field given as --name VALUE; a `bool` is a flag."""
    return dataclasses.field(
        default=default, metadata={"help": help, "positional": False, "metavar": metavar}
    )


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
    return command.Options(**values, **collected)


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
        from polyformer.plugins import import_named

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


def run_module(name: str, settings: dict[str, Any]) -> None:
    """Call `run(config)` of the module `name`, with its configuration made from `settings`.

    One value does for an option that takes a list.
    """
    module = importlib.import_module(name)
    config = typing.get_type_hints(module.run)["config"]
    values = {key.replace("-", "_"): value for key, value in settings.items()}
    for key, hint in typing.get_type_hints(config).items():
        if typing.get_origin(hint) is tuple and key in values and not isinstance(values[key], list):
            values[key] = [values[key]]
    module.run(config.from_dict(values))


def module_help(name: str) -> str:
    """What the experiment in the module `name` measures, and its settings with their defaults."""
    module = importlib.import_module(name)
    config = typing.get_type_hints(module.run)["config"]
    lines = [(module.__doc__ or "").strip(), "", f"settings of {name.rpartition('.')[2].replace('_', '-')}:"]
    for field in dataclasses.fields(config):
        value = "required" if field.default is dataclasses.MISSING else _default(field.default)
        lines.append(f"  --{field.name.replace('_', '-'):<20} {value}")
    return "\n".join(lines)


def _default(value: Any) -> str:
    """A default as it would be typed."""
    if isinstance(value, tuple):
        return " ".join(f'"{item}"' if " " in str(item) else str(item) for item in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return str(value)


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
    text, options = field.metadata["help"], {"metavar": metavar(field, hint)}
    if field.metadata["positional"]:
        if field.default is not dataclasses.MISSING:
            options |= {"nargs": "?", "default": field.default}
        if typing.get_origin(hint) is tuple:
            hint, options["nargs"] = typing.get_args(hint)[0], "+"
        parser.add_argument(field.name, type=hint, help=text, **options)
    elif hint is bool:
        parser.add_argument(flag(field), action="store_true", help=text)
    else:
        parser.add_argument(flag(field), type=hint, default=field.default, help=text, **options)


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
        return InputError(f"unexpected {quote(first)}: put quotes around a text of several words")
    if missing := re.search(r'Key "(\w+)" is required|arguments are required: (\S+?),?(\s|$)', text):
        key = missing.group(1) or missing.group(2)
        return InputError(f"{place(fields[key])} is missing; see polyformer {name} --help")
    key = re.search(r'Parser key "(\w+)"', text)
    value = re.search(r"(?:Got value|Given value): (.*)", text)
    if key and value:
        name = field_name(key.group(1))
        field, hint = fields[name], hints[name]
        word = place(field) if field.metadata["positional"] else flag(field)
        return InputError(f"{word}: expected {_words(hint)}, got {quote(value.group(1).strip())}")
    if alone := re.search(r"argument (--\S+): expected one argument", text):
        return InputError(f"{alone.group(1)}: expected a value after it")
    return InputError(" ".join(text.split()))


def _words(hint: Any) -> str:
    """A type in words: `int | None` as "int", a literal as its choices."""
    alternatives = [part for part in typing.get_args(hint) if part is not type(None)]
    if not alternatives:
        return hint.__name__ if isinstance(hint, type) else repr(hint)
    return " or ".join(map(_words, alternatives))
