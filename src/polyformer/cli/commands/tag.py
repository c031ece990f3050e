"""Tag the words of texts with a trained model.

The texts are arguments, a file (--file), or the lines of standard input. Prints one line per word: the word,
a tab, its tag; and an empty line after each text (the CoNLL format).
"""

from dataclasses import dataclass

from polyformer.cli.commands.input_lines import input_lines, text_file, text_lines
from polyformer.cli.commands.options import Device, argument, device

EXAMPLES = """examples:
  polyformer tag runs/wnut17-1 "Anna flew from Paris to Oslo ."
  polyformer tag runs/wnut17-1 --file article.txt
  polyformer tag runs/wnut17-1 --lines < sentences.txt > tagged.conll
"""


@dataclass(frozen=True, kw_only=True)
class TagOptions:
    """Options of `polyformer tag`."""

    run: str = argument(
        "folder of a trained run of the task tag, or of a checkpoint with a tagging head", metavar="RUN"
    )
    text: tuple[str, ...] = argument(
        "texts to tag, each in quotes (default: every line of standard input)", ()
    )
    file: str | None = text_file()
    lines: bool = text_lines()
    device: Device = device()


def run(options: TagOptions) -> None:
    """Print words and tags."""
    from polyformer.applications.loaded import load_for
    from polyformer.core.ops.cpu import model_threads

    loaded = load_for(options.run, "tag", options.device)
    with model_threads(loaded.model):
        for texts in input_lines(options.text, options.file, options.lines):
            for tagged in loaded.tag(texts):
                print("".join(f"{word}\t{tag}\n" for word, tag in tagged), flush=True)
