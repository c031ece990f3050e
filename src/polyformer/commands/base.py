"""A command's options: a dataclass to a parser, and back. A command is a module of this package with a
docstring (its help), `EXAMPLES`, the dataclass `Options`, and `run(options)`.
"""

import argparse
import dataclasses
import importlib
import re
import typing
from types import ModuleType
from typing import Any

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.parsing import parse_yaml

DOTTED, BARE = r"--[\w-]+(\.[\w-]+)+", r"--[\w.-]+"


def argument(help: str, default: Any = dataclasses.MISSING) -> Any:
    """A field given by its place; one with a default may be left out."""
    return _field(help, default, place=True)


def option(help: str, default: Any = None) -> Any:
    """A field given by its name; a `bool` is a flag."""
    return _field(help, default, place=False)


def changes(help: str, bare: bool = False) -> Any:
    """A field that collects what is given as --dotted.name VALUE; with `bare` every --name VALUE."""
    return dataclasses.field(
        default_factory=dict, metadata={"help": help, "changes": BARE if bare else DOTTED}
    )


def imports() -> Any:
    """A field that collects the names after --import, which every command takes."""
    return dataclasses.field(default=(), metadata={"imports": True})


def parse(name: str, command: ModuleType, argv: list[str]) -> Any:
    """The options of one command from its part of the command line; raises `InputError`, exits for --help."""
    found: dict[str, Any] = {}
    argv, named = imported(argv)
    for field in dataclasses.fields(command.Options):
        if "imports" in field.metadata:
            found[field.name] = named
        if pattern := field.metadata.get("changes"):
            argv, found[field.name] = split(argv, pattern, several=pattern == BARE)
    try:
        values = vars(_parser(name, command).parse_args(argv))
    except argparse.ArgumentError as error:
        raise _readable(error, command.Options) from error
    values.pop("import")  # taken off before, and in the parser for its help
    return command.Options(**values, **found)


def imported(argv: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The command line without `--import NAME`, and the names, which are imported now."""
    rest: list[str] = []
    names: list[str] = []
    left = list(argv)
    while left:
        flag, equals, value = (word := left.pop(0)).partition("=")
        if flag != "--import":
            rest.append(word)
        elif not equals and not left:
            raise InputError("--import: expected a file or a module after it")
        else:
            names.append(value if equals else left.pop(0))
    if names:
        from polyformer.plugins import import_named

        for name in names:
            import_named(name)
    return rest, tuple(names)


def split(argv: list[str], pattern: str, several: bool = False) -> tuple[list[str], dict[str, Any]]:
    """The command line without the `--name VALUE` pairs whose names fit, and those by name, read as YAML.

    With `several`, a name takes all values up to the next one: none is true, and more than one are a list.
    """
    rest: list[str] = []
    found: dict[str, Any] = {}
    left = list(argv)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if not re.fullmatch(pattern, name) or name in ("-h", "--help"):
            rest.append(word)
            continue
        values = [value] if equals else []
        while not equals and left and not left[0].startswith("--") and (several or not values):
            values.append(left.pop(0))
        if not values and not several:
            raise InputError(f"{name}: expected a value after it")
        read = [parse_yaml(one, name, "; put quotes around a text") for one in values]
        found[name.removeprefix("--")] = (read[0] if len(read) == 1 else read) if read else True
    return rest, found


def run_module(name: str, settings: dict[str, Any]) -> None:
    """Call `run(config)` of the module `name`, with its configuration made from `settings`.

    One value does for an option that takes a list.
    """
    module = importlib.import_module(name)
    config = typing.get_type_hints(module.run)["config"]
    given = {key.replace("-", "_"): value for key, value in settings.items()}
    for key, hint in typing.get_type_hints(config).items():
        if typing.get_origin(hint) is tuple and key in given and not isinstance(given[key], list):
            given[key] = [given[key]]
    module.run(config.from_dict(given))


def _field(help: str, default: Any, place: bool) -> Any:
    metadata = {"help": help, "place": place}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _parser(name: str, command: ModuleType) -> Any:
    from jsonargparse import ArgumentParser

    assert command.__doc__
    parser = ArgumentParser(
        prog=f"polyformer {name}",
        description=command.__doc__,
        epilog=command.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
    )
    hints = typing.get_type_hints(command.Options)
    for field in dataclasses.fields(command.Options):
        if "imports" not in field.metadata:
            _add(parser, field, hints[field.name])
    parser.add_argument(
        "--import", action="append", metavar="FILE", help="import a file or a module with parts of your own"
    )
    return parser


def _add(parser: Any, field: "dataclasses.Field[Any]", hint: Any) -> None:
    text = field.metadata["help"]
    flag = "--" + field.name.replace("_", "-")
    if "changes" in field.metadata:
        parser.add_argument_group("other options", text)
    elif not field.metadata["place"]:
        settings = {"action": "store_true"} if hint is bool else {"type": hint, "default": field.default}
        parser.add_argument(flag, help=text, **settings)
    elif field.default is dataclasses.MISSING:
        parser.add_argument(field.name, type=hint, help=text)
    else:
        parser.add_argument(field.name, type=hint, nargs="?", default=field.default, help=text)


def _readable(error: argparse.ArgumentError, options: type[Any]) -> InputError:
    """The parser's complaint in one line, in the words of the other errors."""
    text = str(error)
    flags = {field.name: "--" + field.name.replace("_", "-") for field in dataclasses.fields(options)}
    if stray := re.search(r"unrecognized arguments: (.*)", text, re.DOTALL):
        first = stray.group(1).split()[0]
        if first.startswith("-"):
            return unknown("option", first.partition("=")[0], flags.values())
        return InputError(f"unexpected {quote(first)}: put quotes around a text of several words")
    name = re.search(r'Parser key "(\w+)"', text)
    value = re.search(r"(?:Got value|Given value): (.*)", text)
    if name and value:
        hint = typing.get_type_hints(options)[name.group(1)]
        return InputError(
            f"{flags[name.group(1)]}: expected {_words(hint)}, got {quote(value.group(1).strip())}"
        )
    return InputError(" ".join(text.split()))


def _words(hint: Any) -> str:
    """A type in words: `int | None` as "int", a literal as its choices."""
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    if not parts:
        return hint.__name__ if isinstance(hint, type) else repr(hint)
    return " or ".join(map(_words, parts))
