"""Classify texts with a trained model: one text, or every line of standard input.

Prints a line for each: the most probable label, a tab, its probability (0 to 1). A model of two texts reads
the second from --pair, or after a tab in each line. A checkpoint does not say whether it reads two: if
every line has one tab, lines are read as two texts, with a note on standard error.
"""

import sys
from dataclasses import dataclass

from polyformer.commands.options import Device, argument, device, option

EXAMPLES = """examples:
  polyformer classify runs/sst2-1 "a gripping, funny film"
  polyformer classify runs/sst2-1 < reviews.txt
  polyformer classify runs/qnli-1 "Who wrote Faust?" --pair "Goethe finished it in 1831."
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer classify` takes."""

    run: str = argument(
        "folder of a trained run of the task classify or classify_pair, or of a checkpoint with such a head",
        metavar="RUN",
    )
    text: str | None = argument("the text to classify (default: every line of standard input)", None)
    pair: str | None = option("second text, for models of two texts: the same for every line", metavar="TEXT")
    device: Device = device()


def run(options: Options) -> None:
    """Print labels and probabilities."""
    from polyformer.commands.input_lines import input_lines, split_at_tabs
    from polyformer.ops.workers import suited
    from polyformer.recipes.reader import Reader
    from polyformer.recipes.run import reader
    from polyformer.tasks import Classification, PairClassification

    task, model = reader(options.run, Classification, options.device)
    tabs = isinstance(task, PairClassification) and options.text is None and options.pair is None
    with suited(model):
        unknown = isinstance(task, Reader) and options.text is None and options.pair is None
        for lines in input_lines(options.text):
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
