"""Classify a text, or every line of standard input, with a trained model: its label and probability."""

from dataclasses import dataclass
from typing import Literal

from polyformer.commands.base import argument, option

EXAMPLES = """examples:
  polyformer classify runs/sst2-1 "a gripping, funny film"
  polyformer classify runs/sst2-1 < reviews.txt
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument("folder of a run of the task classify, or of a checkpoint with such a head")
    text: str | None = argument("what to classify (default: every line of standard input)", None)
    device: Literal["auto", "cpu", "cuda"] = option(
        "where to compute (default: CUDA where there is one)", "auto"
    )


def run(options: Options) -> None:
    from polyformer.commands.texts import given
    from polyformer.recipes.run import reader
    from polyformer.tasks import Classification

    task, model = reader(options.run, Classification, options.device)
    for batch in given(options.text):
        for shares in task.classify(model, batch):
            label = max(shares, key=lambda name: shares[name])
            print(f"{label}\t{shares[label]:.4f}", flush=True)
