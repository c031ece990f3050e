"""Translate or summarize texts with a trained model.

The texts are arguments, a file (--file), or the lines of standard input. A run writes for each text the kind
of output that it was trained on: a translation, a generated summary, or the sentences that summarize it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyformer.cli.commands.input_lines import input_lines, text_file, text_lines
from polyformer.cli.commands.options import Device, argument, device, option
from polyformer.core.errors import InputError

EXAMPLES = """examples:
  polyformer translate runs/multi30k-1 "Two dogs are running through the snow." "A man is reading."
  polyformer translate runs/multi30k-1 --num-beams 1 --lines < english.txt > german.txt
  polyformer translate runs/summarize-1 --file article.txt
  polyformer translate runs/summarize-1 --file articles.txt --lines     # an article on each line
  polyformer translate m2m100 --source-language en --target-language de "Two dogs are running."
"""


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    """Options of `polyformer translate`."""

    run: str = argument(
        "folder of a run of the task translate, summarize or extract, or of an encoder-decoder checkpoint",
        metavar="RUN",
    )
    text: tuple[str, ...] = argument(
        "texts to translate, each in quotes (default: every line of standard input)", ()
    )
    file: str | None = text_file()
    lines: bool = text_lines()
    num_beams: int | None = option(
        "number of beams; 1 is greedy decoding (default: as in the run's recipe or the checkpoint)"
    )
    source_language: str | None = option(
        "for multilingual checkpoints: code of the texts' language, such as en", metavar="CODE"
    )
    target_language: str | None = option(
        "for multilingual checkpoints: code of the language to translate into", metavar="CODE"
    )
    device: Device = device()


def run(options: TranslateOptions) -> None:
    """Print the translations."""
    from polyformer.core.ops.cpu_threads import model_threads

    translate, model = _extractor(options) or _translator(options)
    with model_threads(model):
        for batch in input_lines(options.text, options.file, options.lines):
            print("\n".join(translate(batch)), flush=True)


Translator = tuple[Callable[[Sequence[str]], list[str]], Any]
"""The function from texts to their outputs, and its model."""


def _translator(options: TranslateOptions) -> Translator:
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
    return lambda texts: task.translate(model, texts, beam), model


def _extractor(options: TranslateOptions) -> Translator | None:
    """Return the extractor of sentences, or None if the model generates its output."""
    from polyformer.training.recipes.run import Run, is_checkpoint
    from polyformer.training.tasks import ExtractConfig, Extraction

    if is_checkpoint(options.run) or not isinstance(Run.open(options.run).recipe.task, ExtractConfig):
        return None
    if options.num_beams or options.source_language or options.target_language:
        raise InputError(
            f"{options.run}: sentences are chosen, not generated; leave out --num-beams, --source-language "
            "and --target-language"
        )
    run = Run.open(options.run)
    task, model = run.task_of(Extraction), run.model(options.device)
    return lambda texts: task.extract(model, texts), model
