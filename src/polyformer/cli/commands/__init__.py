"""The commands of `polyformer`, a module each: a docstring (its help), `EXAMPLES`, `Options` and
`run(options)`. Other distributions add commands through the entry points of `GROUP`.

Other modules are shared by commands: `options` (command line to dataclass), `input_lines` (texts to read),
`recipe_options` and `training_run` (of train and distill), `model_and_texts` (of explore, spectrum and
calibrate),
`show_pictures` and `show_prediction`, `evaluate_*`.
"""

from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

from polyformer.core.errors import InputError

GROUP = "polyformer.commands"
"""The group of entry points by which a distribution adds commands."""

LABORATORY = ("bench", "reproduce")
"""Commands of the distribution polyformer-lab."""

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
    "list",
    "convert",
    "calibrate",
    "show",
    "explore",
    "spectrum",
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
        InputError: its distribution is not installed.
    """
    if name not in LABORATORY:
        return import_module(f"{__name__}.{name}")
    if not is_installed(name):
        raise InputError(
            f"the command {name} belongs to polyformer-lab, which is not installed; "
            "pip install 'polyformer[lab]'"
        )
    (point,) = entry_points(group=GROUP, name=name)
    return point.load()
