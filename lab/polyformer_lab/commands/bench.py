"""Measure speed and memory, compared with other libraries if they are installed.

all: the project's table, compared with alternative libraries. attached: BERT of transformers with an attached
pattern. attention: one attention layer, by pattern or mechanism and length. families: public models on real
texts, compared with transformers. generation: generated tokens/s. models: Longformer, BigBird. neighbours:
searches in a datastore. overhead: tiny models, compared with plain PyTorch. products: matrix products. store:
lookups in the store of a Memorizing Transformer. training: training steps. report: saved records
(--out) as Markdown.
"""

import dataclasses
import importlib
import typing
from dataclasses import dataclass
from typing import Any, Literal

from polyformer.cli.commands.options import BARE, argument, choices, settings

EXAMPLES = """examples:
  polyformer bench all --out mine.json   # an hour or two; the same command resumes it
  polyformer bench all --only gpt2-step window --instruction-sets default
  polyformer bench report --files mine.json
  polyformer bench attention
  polyformer bench attention --help      # its settings and their defaults
  polyformer bench attention --members "Window(256)" "Window(256) + alibi" --lengths 4096 8192 --backward
  polyformer bench attached --pattern "Window(64) | Global(1)"
  polyformer bench training --layers 6 --repeats 3 --instruction-sets default avx2 --out steps.json
  polyformer bench families --presets bert-base --head classify --data IMDB-DIR --tokenizer DIR --backward
  polyformer bench generation --libraries transformers ctranslate2 polyformer
  polyformer bench generation --models smollm2-135m --prompt 8192 --new-tokens 1 --beams []
  polyformer bench models --models longformer --length 2048
  polyformer bench neighbours --entries 100000
  polyformer bench overhead --threads 1
  polyformer bench store --entries 8192
"""

What = (
    Literal["all", "attached", "attention", "families", "generation", "models"]
    | Literal["neighbours", "overhead", "products", "report", "store", "training"]
)
MODULES = "polyformer_lab.bench"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `polyformer bench`."""

    what: What = argument("measurement to run")
    changes: dict[str, Any] = settings(
        BARE,
        "experiment settings",
        "--NAME VALUE ...  polyformer bench WHAT --help lists them with their defaults",
    )


def details(argv: list[str]) -> str:
    """Return the settings of the named measurement, if there is one."""
    return module_help(f"{MODULES}.{argv[0]}") if argv and argv[0] in choices(What) else ""


def run(options: BenchOptions) -> None:
    """Run the measurement and print its results."""
    run_module(f"{MODULES}.{options.what}", options.changes)


def run_module(name: str, changes: dict[str, Any]) -> None:
    """Call `run(config)` of the module `name`, with its configuration made from `changes`.

    A single value is accepted for an option that takes a list.
    """
    module = importlib.import_module(name)
    config = typing.get_type_hints(module.run)["config"]
    values = {key.replace("-", "_"): value for key, value in changes.items()}
    for key, hint in typing.get_type_hints(config).items():
        if typing.get_origin(hint) is tuple and key in values and not isinstance(values[key], list):
            values[key] = [values[key]]
    module.run(config.from_dict(values))


def module_help(name: str) -> str:
    """Return the documentation of the module `name` and its settings with their defaults."""
    module = importlib.import_module(name)
    config = typing.get_type_hints(module.run)["config"]
    lines = [(module.__doc__ or "").strip(), "", f"settings of {name.rpartition('.')[2].replace('_', '-')}:"]
    for field in dataclasses.fields(config):
        value = "required" if field.default is dataclasses.MISSING else _default(field.default)
        lines.append(f"  --{field.name.replace('_', '-'):<20} {value}")
    return "\n".join(lines)


def _default(value: Any) -> str:
    """Return a default as it is typed on the command line."""
    if isinstance(value, tuple):
        return " ".join(f'"{item}"' if " " in str(item) else str(item) for item in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return str(value)
