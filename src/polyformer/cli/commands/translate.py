"""Translate texts with a trained model, or summarise them: the arguments, or each line of standard input.

A run generates the kind of text that it was trained on, a translation or a summary.
"""

from dataclasses import dataclass

from polyformer.cli.commands.options import Device, argument, device, option
from polyformer.core.errors import InputError

EXAMPLES = """examples:
  polyformer translate runs/multi30k-1 "Two dogs are running through the snow." "A man is reading."
  polyformer translate runs/multi30k-1 --num-beams 1 < english.txt > german.txt
  polyformer translate runs/summarize-1 < articles.txt     # an article on each line
  polyformer translate m2m100 --source-language en --target-language de "Two dogs are running."
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer translate` takes."""

    run: str = argument(
        "folder of a trained run of the task translate or summarize, or of an encoder-decoder checkpoint",
        metavar="RUN",
    )
    text: tuple[str, ...] = argument(
        "texts to translate, each in quotes (default: every line of standard input)", ()
    )
    num_beams: int | None = option(
        "beams of beam search; 1 is greedy (default: from the run's recipe or the checkpoint)"
    )
    source_language: str | None = option(
        "code of the text's language, such as en; for multilingual checkpoints", metavar="CODE"
    )
    target_language: str | None = option(
        "code of the language to translate into; for multilingual checkpoints", metavar="CODE"
    )
    device: Device = device()


def run(options: Options) -> None:
    """Print the translations."""
    from polyformer.cli.commands.input_lines import input_lines
    from polyformer.core.ops.workers import suited
    from polyformer.models.generation import BeamConfig
    from polyformer.training.recipes.run import writer
    from polyformer.training.recipes.writer import Writer
    from polyformer.training.tasks import SequenceToSequence

    task, model = writer(options.run, SequenceToSequence, options.device)
    languages = options.source_language, options.target_language
    if isinstance(task, Writer):
        task.between(*languages)
    elif any(languages):
        raise InputError(
            f"{options.run}: a run has no language codes; leave out --source-language and --target-language"
        )
    beam = None if options.num_beams is None else BeamConfig(num_beams=options.num_beams)
    with suited(model):
        for batch in input_lines(options.text):
            print("\n".join(task.translate(model, batch, beam)), flush=True)
