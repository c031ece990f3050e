"""Translate a text, or every line of standard input, with a trained model."""

from dataclasses import dataclass
from typing import Literal

from polyformer.commands.base import argument, option
from polyformer.core.errors import InputError

EXAMPLES = """examples:
  polyformer translate runs/multi30k-1 "Two dogs are running through the snow."
  polyformer translate runs/multi30k-1 --num-beams 1 < english.txt > german.txt
  polyformer translate m2m100 --source-language en --target-language de "Two dogs are running."
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument("folder of a run of the task translate, or of an encoder-decoder's checkpoint")
    text: str | None = argument("what to translate (default: every line of standard input)", None)
    num_beams: int | None = option(
        "beams of the search (default: those of the run's recipe or of the checkpoint)"
    )
    source_language: str | None = option("what TEXT is written in, such as en, for models of many languages")
    target_language: str | None = option("what to write, for models of many languages")
    device: Literal["auto", "cpu", "cuda"] = option(
        "where to compute (default: CUDA where there is one)", "auto"
    )


def run(options: Options) -> None:
    from polyformer.commands.texts import given
    from polyformer.generation import BeamConfig
    from polyformer.ops.workers import suited
    from polyformer.recipes.run import writer
    from polyformer.recipes.writer import Writer
    from polyformer.tasks import Translation

    task, model = writer(options.run, Translation, options.device)
    languages = options.source_language, options.target_language
    if isinstance(task, Writer):
        task.between(*languages)
    elif any(languages):
        raise InputError(
            f"{options.run}: a run knows no languages; leave --source-language and --target-language out"
        )
    beam = None if options.num_beams is None else BeamConfig(num_beams=options.num_beams)
    with suited(model):
        for batch in given(options.text):
            print("\n".join(task.translate(model, batch, beam)), flush=True)
