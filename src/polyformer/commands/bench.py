"""Measure speed and memory, beside other libraries where they are installed."""

from dataclasses import dataclass
from typing import Any, Literal

from polyformer.commands.base import argument, changes, run_module

EXAMPLES = """examples:
  polyformer bench attention
  polyformer bench training --layers 6 --repeats 3
  polyformer bench generation
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    what: Literal["attention", "generation", "training"] = argument("attention, generation or training")
    changes: dict[str, Any] = changes("--NAME VALUE changes one setting of the measurement", bare=True)


def run(options: Options) -> None:
    run_module(f"polyformer.bench.{options.what}", options.changes)
