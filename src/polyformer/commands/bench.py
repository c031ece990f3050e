"""Measure speed and memory, beside other libraries where they are installed.

attention: one attention layer, by pattern or mechanism and length. families: one model with each kind of
attention. generation: tokens a second. models: whole models beside transformers. training: training steps.
"""

from dataclasses import dataclass
from typing import Any, Literal

from polyformer.commands.options import argument, choices, experiment_settings, module_help, run_module

EXAMPLES = """examples:
  polyformer bench attention
  polyformer bench attention --help      # its settings and their defaults
  polyformer bench attention --members "Window(256)" "Window(256) + alibi" --lengths 4096 8192 --backward
  polyformer bench training --layers 6 --repeats 3
  polyformer bench families --presets bert-base --head classify --data IMDB-DIR --tokenizer DIR --backward
  polyformer bench generation
  polyformer bench models --models longformer --length 2048
"""

What = Literal["attention", "families", "generation", "models", "training"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer bench` takes."""

    what: What = argument("what is measured")
    changes: dict[str, Any] = experiment_settings("polyformer bench WHAT")


def details(argv: list[str]) -> str:
    """The settings of the measurement that the words name, if they name one."""
    return module_help(f"polyformer.bench.{argv[0]}") if argv[0] in choices(What) else ""


def run(options: Options) -> None:
    """Run the measurement, which prints its results."""
    run_module(f"polyformer.bench.{options.what}", options.changes)
