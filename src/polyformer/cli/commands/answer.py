"""Answer questions about a text with a trained model.

The questions are arguments, a file (--file), or the lines of standard input. Prints one answer per line, an
excerpt of the text, or an empty line if the model finds no answer.
"""

from dataclasses import dataclass
from pathlib import Path

from polyformer.cli.commands.input_lines import input_lines, text_file, text_lines
from polyformer.cli.commands.options import Device, argument, device

EXAMPLES = """examples:
  polyformer answer runs/squad-1 article.txt "Who wrote it?" "When?"
  polyformer answer runs/squad-1 article.txt --file questions.txt --lines
"""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Options of `polyformer answer`."""

    run: str = argument(
        "folder of a trained run of the task qa, or of a checkpoint with a span head", metavar="RUN"
    )
    source: str = argument("file with the text that contains the answers", metavar="FILE")
    text: tuple[str, ...] = argument(
        "questions, each in quotes (default: every line of standard input)", (), "QUESTION"
    )
    file: str | None = text_file("QUESTION")
    lines: bool = text_lines()
    device: Device = device()


def run(options: AnswerOptions) -> None:
    """Print the answers."""
    from polyformer.applications.loaded import Verbatim, load_for
    from polyformer.core.ops.cpu import model_threads
    from polyformer.data.sources.files import whole_text

    context = Verbatim(whole_text(Path(options.source)))
    loaded = load_for(options.run, "answer", options.device)
    with model_threads(loaded.model):
        for questions in input_lines(options.text, options.file, options.lines):
            for answer in loaded.answer(questions, context):
                print(" ".join(answer.split()), flush=True)
