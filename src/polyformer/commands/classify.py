"""Classify a text, or every line of standard input, with a trained model: its label and probability.

A model of two texts reads the second from --pair, or behind a tab of each line. Of a checkpoint it is not
known how many texts it reads: lines that all have one tab are two texts each, and that is said.
"""

import sys
from dataclasses import dataclass
from typing import Literal

from polyformer.commands.base import argument, option

EXAMPLES = """examples:
  polyformer classify runs/sst2-1 "a gripping, funny film"
  polyformer classify runs/sst2-1 < reviews.txt
  polyformer classify runs/qnli-1 "Who wrote Faust?" --pair "Goethe finished it in 1831."
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument("folder of a run of the task classify, or of a checkpoint with such a head")
    text: str | None = argument("what to classify (default: every line of standard input)", None)
    pair: str | None = option("second text, for models of two: the same for every line")
    device: Literal["auto", "cpu", "cuda"] = option(
        "where to compute (default: CUDA where there is one)", "auto"
    )


def run(options: Options) -> None:
    from polyformer.commands.texts import given, split_at_tabs
    from polyformer.ops.workers import suited
    from polyformer.recipes.reader import Reader
    from polyformer.recipes.run import reader
    from polyformer.tasks import Classification, PairClassification

    task, model = reader(options.run, Classification, options.device)
    tabs = isinstance(task, PairClassification) and options.text is None and options.pair is None
    with suited(model):
        unknown = isinstance(task, Reader) and options.text is None and options.pair is None
        for lines in given(options.text):
            if unknown and all(line.count("\t") == 1 for line in lines):
                print("polyformer: each line has one tab, and is read as two texts", file=sys.stderr)
                tabs = True
            unknown = False
            texts, pairs = split_at_tabs(lines) if tabs else (lines, None)
            if options.pair is not None:
                pairs = [options.pair] * len(texts)
            for shares in task.classify(model, texts, pairs):
                label = max(shares, key=lambda name: shares[name])
                print(f"{label}\t{shares[label]:.4f}", flush=True)
            while isinstance(task, Classification) and task.notes:
                print(f"polyformer: {task.notes.pop(0)}", file=sys.stderr)
