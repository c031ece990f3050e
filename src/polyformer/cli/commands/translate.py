"""Translate or summarize texts with a trained model.

The texts are arguments, a file (--file), or the lines of standard input. A run writes for each text the kind
of output that it was trained on: a translation, a generated summary, or the sentences that summarize it.
"""

from dataclasses import dataclass

from polyformer.cli.commands.input_lines import input_lines, text_file, text_lines
from polyformer.cli.commands.options import Device, argument, device, option, set_options

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
    from polyformer.applications.loaded import load_for
    from polyformer.core.ops.cpu import model_threads

    loaded = load_for(options.run, "translate", options.device)
    settings = set_options(options, ("num_beams", "source_language", "target_language"))
    with model_threads(loaded.model):
        for texts in input_lines(options.text, options.file, options.lines):
            print("\n".join(loaded.predict(texts, **settings)), flush=True)
