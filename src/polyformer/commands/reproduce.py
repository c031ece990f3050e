"""Reproduce a published claim: train what it takes, print the measurements and whether the claim holds."""

import importlib.util
import pkgutil
import textwrap
from dataclasses import dataclass
from typing import Any

from polyformer.commands.options import argument, experiment_settings, module_help, run_module
from polyformer.core.errors import unknown

EXAMPLES = """examples:
  polyformer reproduce all --quick                    # every claim for some seconds, and one page of them
  polyformer reproduce all --data DIR --decoder DIR   # all whose data are there, hours; a second call goes on
  polyformer reproduce warmup                         # post-norm needs warm-up, pre-norm does not
  polyformer reproduce batch-norm --data DIR          # batch normalisation beside layer normalisation
  polyformer reproduce warmup --help                  # the settings of one claim and their defaults
  polyformer reproduce extrapolation --data DIR       # ALiBi: train short, test long
  polyformer reproduce transformer-xl --data DIR      # a memory of earlier segments, at equal compute
  polyformer reproduce compressive --data BOOK        # a compressed memory, at equal state
  polyformer reproduce memorizing --data BOOK         # a larger store, and one given to a trained model
  polyformer reproduce gtrxl                          # GTrXL's policies beside a plain Transformer-XL's
  polyformer reproduce long-texts --model DIR --data DIR  # a checkpoint reads beyond its length
  polyformer reproduce long-documents --model DIR --data BOOK  # a passage finds its chapter
  polyformer reproduce memorizing-pretrained --model DIR --data BOOK    # a store for a real checkpoint
  polyformer reproduce random-features                # orthogonal positive features have the smallest error
  polyformer reproduce image-locality                 # local attention around a pixel suffices to predict it
  polyformer reproduce listops                        # nested lists by ten mechanisms at one budget
  polyformer reproduce shared-weights --data DIR      # tied output matrix, one layer's weights for all
  polyformer reproduce low-rank --model DIR --data DIR    # singular values of a trained encoder's attention
  polyformer reproduce sinks --model DIR --data DIR   # what a trained decoder gives the first token
  polyformer reproduce linformer-theory               # the errors in the theorems against k
  polyformer reproduce linformer-speed                # time and memory beside the paper's tables
  polyformer reproduce linformer-quality --data DIR   # perplexity against k, sharing and n
  polyformer reproduce downstream --sst2 DIR --imdb DIR   # SST-2 and IMDB with each kind of attention
  polyformer reproduce electra --data DIR --sst2 DIR  # beside masked language modelling at equal compute
  polyformer reproduce distillation --sst2 DIR        # a teacher's soft targets in place of most data
  polyformer reproduce knn-lm --model DIR --data DIR      # neighbours lower the perplexity of a model
  polyformer reproduce calm --model DIR --data DIR        # exits by confidence beside a fixed smaller depth
  polyformer reproduce depth-adaptive --data DIR      # BLEU with a fraction of the decoder's layers
  polyformer reproduce spalm --data DIR               # training with neighbours, beside mixing them in
  polyformer reproduce universal                      # strings longer than those trained on
  polyformer reproduce act                            # more steps for what is harder
  polyformer reproduce members --data BOOK            # every member at one budget, beside dense
  polyformer reproduce decision-transformer           # the return achieved follows the return asked for
"""

HOME = "polyformer.bench.reproduce"  # a module for each claim, with `run(config)`


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer reproduce` takes."""

    claim: str = argument("name of the claim")
    changes: dict[str, Any] = experiment_settings("polyformer reproduce CLAIM")


def claims() -> list[str]:
    """The names of all claims, as they are typed."""
    spec = importlib.util.find_spec(HOME)
    places = spec.submodule_search_locations if spec else None
    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(places or [])]


def details(argv: list[str]) -> str:
    """The settings of the claim that the words name, or all claims."""
    if argv[0] in claims():
        return module_help(_module(argv[0]))
    text = f"claims: {', '.join(claims())}"
    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)


def run(options: Options) -> None:
    """Run the experiment, which prints its results."""
    if options.claim.replace("_", "-") not in claims():
        raise unknown("claim", options.claim, claims())
    run_module(_module(options.claim), options.changes)


def _module(claim: str) -> str:
    return f"{HOME}.{claim.replace('-', '_')}"
