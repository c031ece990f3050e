"""Choose one of several answers to each question with a trained model.

The questions are arguments, a file (--file), or the lines of standard input. Prints for each question the
most probable choice, a tab, and its probability (0 to 1). A line contains a question and its choices,
separated by tabs; with --choices, which then apply to all questions, it contains only the question.
"""

from dataclasses import dataclass
from typing import Any

from polyformer.cli.commands.input_lines import input_lines, text_file, text_lines
from polyformer.cli.commands.options import Device, argument, device, option

EXAMPLES = """examples:
  polyformer choose runs/swag-1 "She opens the oven and" --choices '["takes out a cake.", "dives in."]'
  polyformer choose runs/swag-1 --lines < questions.tsv
"""


@dataclass(frozen=True, kw_only=True)
class ChooseOptions:
    """Options of `polyformer choose`."""

    run: str = argument(
        "folder of a trained run of the task choose, or of a multiple-choice checkpoint", metavar="RUN"
    )
    text: tuple[str, ...] = argument(
        "questions, each in quotes (default: every line of standard input)", (), "QUESTION"
    )
    file: str | None = text_file("QUESTION")
    lines: bool = text_lines()
    choices: str | None = option("choices for all questions, a JSON list", metavar="LIST")
    device: Device = device()


def run(options: ChooseOptions) -> None:
    """Print choices and probabilities."""
    from polyformer.applications.loaded import Verbatim, load_for
    from polyformer.core.ops.cpu import model_threads
    from polyformer.data.formats.columns import listed

    choices: Any = None
    if options.choices is not None:
        choices = [*map(Verbatim, listed(options.choices, "--choices"))]
    loaded = load_for(options.run, "choose", options.device)
    with model_threads(loaded.model):
        for lines in input_lines(options.text, options.file, options.lines):
            questions = [_question(line, choices) for line in lines]
            texts, lists = [text for text, _ in questions], [own for _, own in questions]
            for result in loaded.choose(texts, lists):
                print(f"{result.choice}\t{result.probability:.4f}", flush=True)


def _question(line: str, choices: list[str] | None) -> tuple[str, list[str]]:
    from polyformer.core.errors import InputError, quote

    if choices is not None:
        return line, choices
    text, *own = line.split("\t")
    if len(own) < 2:
        raise InputError(
            "QUESTION: expected a question and two or more choices separated by tabs, or --choices, got "
            f"{quote(line)}"
        )
    return text, own
