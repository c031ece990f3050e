"""Measure speed and memory, beside other libraries where they are installed."""

from dataclasses import dataclass
from typing import Any, Literal

from polyformer.commands.base import argument, changes, run_module

EXAMPLES = """examples:
  polyformer bench attention
  polyformer bench attention --members "Window(256)" "Window(256) + alibi" --lengths 4096 8192 --backward
  polyformer bench training --layers 6 --repeats 3
  polyformer bench families --presets bert-base --head classify --data IMDB-DIR --tokenizer DIR --backward
  polyformer bench generation
  polyformer bench models --models longformer --length 2048
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    what: Literal["attention", "families", "generation", "models", "training"] = argument(
        "attention, families, generation, models or training"
    )
    changes: dict[str, Any] = changes("--NAME VALUE ... changes one setting of the measurement", bare=True)


def run(options: Options) -> None:
    run_module(f"polyformer.bench.{options.what}", options.changes)
