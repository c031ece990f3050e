"""Answer a question, or every line of standard input, from a text with a trained model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyformer.commands.base import argument, option

EXAMPLES = """examples:
  polyformer answer runs/squad-1 article.txt "Who wrote it?"
  polyformer answer runs/squad-1 article.txt < questions.txt
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument("folder of a run of the task qa, or of a checkpoint with such a head")
    source: str = argument("file of the text that has the answers")
    text: str | None = argument("the question (default: every line of standard input)", None)
    device: Literal["auto", "cpu", "cuda"] = option(
        "where to compute (default: CUDA where there is one)", "auto"
    )


def run(options: Options) -> None:
    from polyformer.commands.texts import given
    from polyformer.data.opening import opened
    from polyformer.ops.workers import suited
    from polyformer.recipes.run import reader
    from polyformer.tasks import Answering

    with opened(Path(options.source)) as file:
        context = file.read()
    task, model = reader(options.run, Answering, options.device)
    with suited(model):
        for batch in given(options.text):
            for answer in task.answer(model, [{"question": one, "context": context} for one in batch]):
                print(" ".join(answer.split()), flush=True)
