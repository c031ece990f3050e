"""The commands of `polyformer`, one module per command.

A command's module has a docstring (its help), `EXAMPLES`, and `run(options)`. The type annotation of
`options` names a dataclass whose fields are the command's options. Other distributions add commands through
the entry points of `GROUP`.

Some modules contain code that several commands share: `options` (parses a command line into a dataclass),
`input_lines` (reads input texts), `training_run` (for train and distill), `before_after` and `recall` (for
convert), `model_and_texts` (for explore, spectrum, ablate, calibrate and fit-pattern), `show_pictures` and
`evaluate_*`.
"""

import typing
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

from polyformer.core.errors import InputError

GROUP = "polyformer.commands"
"""The group of entry points through which a distribution adds commands."""

LABORATORY = ("bench", "reproduce")
"""Commands in the distribution polyformer-lab."""

COMMANDS = (
    "data",
    "record",
    "train",
    "distill",
    "evaluate",
    "datastore",
    "generate",
    "translate",
    "classify",
    "tag",
    "answer",
    "choose",
    "embed",
    "prompt",
    "probe",
    "audit",
    "list",
    "convert",
    "fit-pattern",
    "export",
    "calibrate",
    "show",
    "explore",
    "spectrum",
    "ablate",
    "tune",
    *LABORATORY,
    "completion",
)


def is_installed(name: str) -> bool:
    """Return whether the command `name` can be loaded."""
    return name not in LABORATORY or bool(entry_points(group=GROUP, name=name))


def load_command(name: str) -> ModuleType:
    """Import the module of the command `name`.

    Raises:
        InputError: The command's distribution is not installed.
    """
    if name not in LABORATORY:
        return import_module(f"{__name__}.{name.replace('-', '_')}")
    if not is_installed(name):
        raise InputError(
            f"the command {name} is part of polyformer-lab, which is not installed; install it with: "
            "pip install 'polyformer[lab]'"
        )
    (point,) = entry_points(group=GROUP, name=name)
    return point.load()


def options_class(command: ModuleType) -> type[typing.Any]:
    """Return the dataclass of a command's options: the type of the argument `options` of its `run`."""
    return typing.get_type_hints(command.run)["options"]
