"""Translate a text, or every line of standard input, with a trained model."""

from dataclasses import dataclass
from typing import Literal

from polyformer.commands.base import argument, option

EXAMPLES = """examples:
  polyformer translate runs/multi30k-1 "Two dogs are running through the snow."
  polyformer translate runs/multi30k-1 --num-beams 1 < english.txt > german.txt
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument("folder of a run of the task translate")
    text: str | None = argument("what to translate (default: every line of standard input)", None)
    num_beams: int | None = option("beams of the search (default: those of the run's recipe)")
    device: Literal["auto", "cpu", "cuda"] = option(
        "where to compute (default: CUDA where there is one)", "auto"
    )


def run(options: Options) -> None:
    from polyformer.commands.texts import given
    from polyformer.generation import BeamConfig
    from polyformer.recipes.run import Run
    from polyformer.tasks import Translation

    run = Run.open(options.run)
    task, model = run.task_of(Translation), run.model(options.device)
    beam = None if options.num_beams is None else BeamConfig(num_beams=options.num_beams)
    for batch in given(options.text):
        print("\n".join(task.translate(model, batch, beam)), flush=True)
