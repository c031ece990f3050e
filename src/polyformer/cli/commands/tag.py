"""Tag the words of texts with a trained model: the arguments, or every line of standard input.

Prints one line per word: the word, a tab, and its tag. An empty line follows each text (the CoNLL format).
"""

import re
from dataclasses import dataclass

from polyformer.cli.commands.options import Device, argument, device

EXAMPLES = """examples:
  polyformer tag runs/wnut17-1 "Anna flew from Paris to Oslo ."
  polyformer tag runs/wnut17-1 < sentences.txt > tagged.conll
"""

WORD = re.compile(r"[@#]?\w+(?:['\u2019.-]\w+)*|\S")  # words with inner punctuation; other marks alone


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer tag` takes."""

    run: str = argument(
        "folder of a trained run of the task tag, or of a checkpoint with such a head", metavar="RUN"
    )
    text: tuple[str, ...] = argument(
        "texts to tag, each in quotes (default: every line of standard input)", ()
    )
    device: Device = device()


def run(options: Options) -> None:
    """Print words and tags."""
    from polyformer.cli.commands.input_lines import input_lines
    from polyformer.core.ops.workers import suited
    from polyformer.training.recipes.run import reader
    from polyformer.training.tasks import Tagging

    task, model = reader(options.run, Tagging, options.device)
    with suited(model):
        for batch in input_lines(options.text):
            sentences = [WORD.findall(text) for text in batch]
            for words, tags in zip(sentences, task.tag(model, sentences)):
                print("".join(f"{word}\t{tag}\n" for word, tag in zip(words, tags)), flush=True)
