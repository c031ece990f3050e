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
    from polyformer.core.ops.cpu_threads import model_threads
    from polyformer.data.compressed_files import opened
    from polyformer.training.recipes.run import reader
    from polyformer.training.tasks import QuestionAnswering

    with opened(Path(options.source)) as file:
        context = file.read()
    task, model = reader(options.run, QuestionAnswering, options.device)
    with model_threads(model):
        for questions in input_lines(options.text, options.file, options.lines):
            rows = [{"question": question, "context": context} for question in questions]
            for answer in task.answer(model, rows):
                print(" ".join(answer.split()), flush=True)
