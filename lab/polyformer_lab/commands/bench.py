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
import inspect
import typing
from collections.abc import Callable
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
PAGES = {
    **{"attached": "models", "families": "passes", "training": "passes", "products": "all"},
    **{"store": "neighbours", "report": "running"},
}
"""The modules of measurements that share one with others; the rest have modules of their own names."""


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
    return settings_help(argv[0]) if argv and argv[0] in choices(What) else ""


def run(options: BenchOptions) -> None:
    """Run the measurement and print its results."""
    run_measurement(options.what, options.changes)


def run_measurement(what: str, changes: dict[str, Any]) -> None:
    """Call the function of a measurement, with its configuration made from `changes`.

    A single value is accepted for an option that takes a list.
    """
    measure, config, _ = measurement(what)
    values = {key.replace("-", "_"): value for key, value in changes.items()}
    for key, hint in typing.get_type_hints(config).items():
        if typing.get_origin(hint) is tuple and key in values and not isinstance(values[key], list):
            values[key] = [values[key]]
    measure(config.from_dict(values))


def measurement(what: str) -> tuple[Callable[[Any], object], type[Any], str]:
    """Return the function of a measurement, the class of its configuration, and its documentation.

    A module of one measurement has `run(config)`; one of several has `run_WHAT(config)` for each.
    """
    module = importlib.import_module(f"polyformer_lab.bench.{PAGES.get(what, what)}")
    own = getattr(module, f"run_{what}", None)
    measure = module.run if own is None else own
    config = typing.get_type_hints(measure)["config"]
    return measure, config, inspect.cleandoc((module if own is None else config).__doc__ or "")


def settings_help(what: str) -> str:
    """Return the documentation of a measurement, and its settings with their defaults."""
    _, config, text = measurement(what)
    lines = [text, "", f"settings of {what}:"]
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
