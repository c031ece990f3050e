"""Reproduce a published claim: trains what it takes and shows the outcome."""

import importlib.util
import pkgutil
from dataclasses import dataclass
from typing import Any

from polyformer.commands.base import argument, changes, run_module
from polyformer.core.errors import unknown

EXAMPLES = """examples:
  polyformer reproduce warmup     # post-norm needs warm-up, pre-norm does not
  polyformer reproduce extrapolation --data DIR     # ALiBi: train short, test long
  polyformer reproduce random-features     # orthogonal positive features err least
  polyformer reproduce image-locality     # blocks around a pixel are enough to predict it
  polyformer reproduce linformer-theory     # the theorems' errors against k
  polyformer reproduce linformer-speed     # time and memory beside the paper's tables
  polyformer reproduce linformer-quality --data DIR     # perplexity against k, sharing and n
  polyformer reproduce downstream --sst2 DIR --imdb DIR     # SST-2 and IMDB with each kind of attention
  polyformer reproduce electra --data DIR --sst2 DIR     # beside masked modelling at equal compute
"""

HOME = "polyformer.bench.reproduce"  # a module for each claim, with `run(config)`


@dataclass(frozen=True, kw_only=True)
class Options:
    claim: str = argument("name of the claim")
    changes: dict[str, Any] = changes("--NAME VALUE changes one setting of the experiment", bare=True)


def run(options: Options) -> None:
    spec = importlib.util.find_spec(HOME)
    places = spec.submodule_search_locations if spec else None
    claims = [module.name for module in pkgutil.iter_modules(places or [])]
    claim = options.claim.replace("-", "_")
    if claim not in claims:
        raise unknown("claim", options.claim, [name.replace("_", "-") for name in claims])
    run_module(f"{HOME}.{claim}", options.changes)
