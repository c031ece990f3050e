"""Choose one of several texts with a trained model, for questions or every line of standard input.

Prints one line per question: the most probable choice, a tab, and its probability (0 to 1). A line of
standard input is a question and its choices, separated by tabs. With --choices all questions have these
choices, and a line is only a question.
"""

from dataclasses import dataclass
from typing import Any

from polyformer.cli.commands.options import Device, argument, device, option

EXAMPLES = """examples:
  polyformer choose runs/swag-1 "She opens the oven and" --choices '["takes out a cake.", "dives in."]'
  polyformer choose runs/swag-1 < questions.tsv
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer choose` takes."""

    run: str = argument(
        "folder of a trained run of the task choose, or of a checkpoint of multiple choice", metavar="RUN"
    )
    text: tuple[str, ...] = argument(
        "questions, each in quotes (default: every line of standard input)", (), "QUESTION"
    )
    choices: str | None = option("the choices, as a JSON list", metavar="LIST")
    device: Device = device()


def run(options: Options) -> None:
    """Print choices and probabilities."""
    from polyformer.cli.commands.input_lines import input_lines
    from polyformer.core.ops.workers import suited
    from polyformer.data.choices import listed
    from polyformer.training.recipes.run import reader
    from polyformer.training.tasks import MultipleChoice

    choices = None if options.choices is None else listed(options.choices, "--choices")
    task, model = reader(options.run, MultipleChoice, options.device)
    with suited(model):
        for lines in input_lines(options.text):
            questions = [_question(line, choices) for line in lines]
            for question, shares in zip(questions, task.choose(model, questions)):
                best = max(range(len(shares)), key=shares.__getitem__)
                print(f"{question['choices'][best]}\t{shares[best]:.4f}", flush=True)


def _question(line: str, choices: list[str] | None) -> dict[str, Any]:
    from polyformer.core.errors import InputError, quote

    if choices is not None:
        return {"text": line, "choices": choices}
    text, *others = line.split("\t")
    if len(others) < 2:
        way = "a question and two choices or more with tabs between, or --choices"
        raise InputError(f"QUESTION: expected {way}, got {quote(line)}")
    return {"text": text, "choices": others}
