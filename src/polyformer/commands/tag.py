"""Tag the words of a text, or of every line of standard input, with a trained model."""

import re
from dataclasses import dataclass
from typing import Literal

from polyformer.commands.base import argument, option

EXAMPLES = """examples:
  polyformer tag runs/wnut17-1 "Anna flew from Paris to Oslo ."
  polyformer tag runs/wnut17-1 < sentences.txt > tagged.conll
"""

WORD = re.compile(r"[@#]?\w+(?:['\u2019.-]\w+)*|\S")  # words with their inner marks; any other mark by itself


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument("folder of a run of the task tag, or of a checkpoint with such a head")
    text: str | None = argument("what to tag (default: every line of standard input)", None)
    device: Literal["auto", "cpu", "cuda"] = option(
        "where to compute (default: CUDA where there is one)", "auto"
    )


def run(options: Options) -> None:
    from polyformer.commands.texts import given
    from polyformer.ops.workers import suited
    from polyformer.recipes.run import reader
    from polyformer.tasks import Tagging

    task, model = reader(options.run, Tagging, options.device)
    with suited(model):
        for batch in given(options.text):
            sentences = [WORD.findall(text) for text in batch]
            for words, tags in zip(sentences, task.tag(model, sentences)):
                print("".join(f"{word}\t{tag}\n" for word, tag in zip(words, tags)), flush=True)
