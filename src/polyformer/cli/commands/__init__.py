"""The commands of `polyformer`, found by their names.

Most commands have a module of their own: its docstring is the help, and it has `EXAMPLES` and `run(options)`.
Commands that belong together share a module (`PAGES`): there the command `tag` has `run_tag(options)`, whose
docstring is the help, and `TAG_EXAMPLES`. The type annotation of `options` names a dataclass whose fields are
the command's options. Other distributions add commands, a module each, through the entry points of `GROUP`.

Some modules contain code that several commands share: `options` (parses a command line into a dataclass),
`inputs` (reads input texts, and models with texts), `before_after` (for convert and fit-pattern) and
`processes`.
"""

import typing
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from polyformer.core.errors import InputError

GROUP = "polyformer.commands"
"""The group of entry points through which a distribution adds commands."""

DISTRIBUTION = "polyformer-lab"
LABORATORY = ("bench", "reproduce")
"""Commands in the distribution `DISTRIBUTION`."""

COMMANDS = {
    "data": "Tokenize text into files that training memory-maps: the text may be larger than memory.",
    "record": "Record episodes in a gymnasium environment as a Minari data set.",
    "train": "Train a model from a recipe.",
    "distill": (
        "Distill a trained run (the teacher) into a smaller, faster model of the same kind (the student)."
    ),
    "evaluate": "Evaluate a trained model: print the metrics of its task on validation and test data.",
    "datastore": "Build a datastore of a text for a causal model: the next token of every context (kNN-LM).",
    "generate": "Continue texts with a trained language model, and print each text while it is generated.",
    "chat": "Talk with a chat model in the terminal: replies appear token by token.",
    "serve": "Serve a model over HTTP, as OpenAI's API: chats, completions and embeddings.",
    "translate": "Translate or summarize texts with a trained model.",
    "classify": "Classify texts or images with a trained model.",
    "tag": "Tag the words of texts with a trained model.",
    "answer": "Answer questions about a text with a trained model.",
    "choose": "Choose one of several answers to each question with a trained model.",
    "embed": "Embed texts or images: write one vector for each to a Parquet file, computed by a model.",
    "prompt": "Answer the questions in a file with a causal language model and few-shot prompts.",
    "probe": "Probe whether a causal language model still finds information in long texts.",
    "audit": (
        "Audit a model: check that padding, batches, caches, packing and precision do not change its outputs."
    ),
    "list": (
        "List recipes, presets, and the registered classes of every kind: mechanisms, patterns, "
        "positions, ..."
    ),
    "convert": (
        "Convert a checkpoint to another format, or to a model with another attention, memory, "
        "depth or length."
    ),
    "fit-pattern": (
        "Find a sparse attention pattern for each head of a trained model, under a budget of query-key pairs."
    ),
    "export": "Export a model as a graph for other runtimes: an ONNX file, or a file for torch.export.",
    "calibrate": (
        "Choose the threshold of a model's early exits for a given risk, and save it in the checkpoint."
    ),
    "show": (
        "Show a model's parameters, costs and modules, or a picture of an attention pattern or a "
        "position scheme."
    ),
    "explore": (
        "Write an interactive page of a model's attention on a text or an image: one file, which "
        "works offline."
    ),
    "spectrum": "Show the singular values of a model's attention matrices, by layer and head.",
    "ablate": "Show which attention heads a decoder needs: the rise of the loss of a text without each head.",
    "tune": "Measure which implementations are fastest on this machine, or show the results.",
    "bench": "Measure speed and memory, compared with other libraries if they are installed.",
    "reproduce": (
        "Run an experiment (a published claim or your own YAML file): a grid of runs, with a "
        "table and a page."
    ),
    "completion": (
        "Print a script that completes commands, options, recipes, presets and class names in a shell."
    ),
}
"""Each command with the first line of its help, which is listed without importing a module."""

PAGES = {
    **dict.fromkeys(("classify", "tag", "translate", "answer", "choose"), "texts"),
    **dict.fromkeys(("prompt", "probe"), "questions"),
    **dict.fromkeys(("convert", "export"), "convert"),
    **dict.fromkeys(("fit-pattern", "calibrate"), "fitting"),
    **dict.fromkeys(("audit", "tune", "spectrum", "ablate"), "measurements"),
    **dict.fromkeys(("list", "completion"), "names"),
    "record": "acting",
}
"""The modules of commands that share one with others."""


class Command(typing.NamedTuple):
    """A command: the function that runs it, its help and its examples.

    details: returns text for the help that depends on the arguments.
    """

    run: Callable[[typing.Any], None]
    help: str
    examples: str
    details: Callable[[list[str]], str] | None = None


def is_installed(name: str) -> bool:
    """Return whether the distribution of the command `name` is there, judged by its package.

    Reading the entry points of all distributions takes longer than the rest of `polyformer --help`.
    """
    return name not in LABORATORY or find_spec(DISTRIBUTION.replace("-", "_")) is not None


def load_command(name: str) -> Command:
    """Import the module of the command `name` and return the command.

    Raises:
        InputError: The command's distribution is not installed.
    """
    from inspect import cleandoc  # loads half of the standard library

    module, own = load_module(name), name.replace("-", "_")
    if name not in PAGES:
        details = getattr(module, "details", None)
        return Command(module.run, cleandoc(module.__doc__ or ""), module.EXAMPLES, details)
    run = getattr(module, f"run_{own}")
    return Command(run, cleandoc(run.__doc__ or ""), getattr(module, f"{own.upper()}_EXAMPLES"))


def load_module(name: str) -> ModuleType:
    """Import the module of the command `name`; raise `InputError` if its distribution is not installed."""
    if name not in LABORATORY:
        return import_module(f"{__name__}.{PAGES.get(name, name)}")
    from importlib.metadata import entry_points  # loads email and half of the standard library

    for point in entry_points(group=GROUP, name=name):
        return point.load()
    raise InputError(
        f"the command {name} is part of {DISTRIBUTION}, which is not installed; install it with: "
        "pip install 'polyformer[lab]'"
    )


def options_class(command: Command) -> type[typing.Any]:
    """Return the dataclass of a command's options: the type of the argument `options` of its `run`."""
    return typing.get_type_hints(command.run)["options"]
