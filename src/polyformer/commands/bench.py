"""Measure speed and memory, beside other libraries where they are installed.

all: the project's own table, ours beside what people would take, as JSON; report: such files as Markdown.
attached: BERT of transformers with a pattern attached. attention: one attention layer, by pattern or
mechanism and length. families: one model with each kind of
attention. generation: tokens a second. models: whole models beside transformers. neighbours: searches in a
datastore. store: look-ups in a Memorizing Transformer's store. training: training steps.
"""

from dataclasses import dataclass
from typing import Any, Literal

from polyformer.commands.options import argument, choices, experiment_settings, module_help, run_module

EXAMPLES = """examples:
  polyformer bench all --out mine.json   # an hour or two; the same command goes on where it was stopped
  polyformer bench all --only gpt2-step window --instruction-sets default
  polyformer bench report --files mine.json
  polyformer bench attention
  polyformer bench attention --help      # its settings and their defaults
  polyformer bench attention --members "Window(256)" "Window(256) + alibi" --lengths 4096 8192 --backward
  polyformer bench attached --pattern "Window(64) | Global(1)"
  polyformer bench training --layers 6 --repeats 3
  polyformer bench families --presets bert-base --head classify --data IMDB-DIR --tokenizer DIR --backward
  polyformer bench generation --libraries transformers ctranslate2 polyformer
  polyformer bench models --models longformer --length 2048
  polyformer bench neighbours --entries 100000
  polyformer bench store --entries 8192
"""

What = Literal[
    "all",
    "attached",
    "attention",
    "families",
    "generation",
    "models",
    "neighbours",
    "report",
    "store",
    "training",
]


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
