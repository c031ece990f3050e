"""Prompts of a wanted number of tokens: the sample with the most units that fits.

    tokens of the prompt + tokens of the answer <= length

Nothing is cut off: a sample that is too long has fewer units, and if the smallest sample is too long, the
length is refused.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from polyformer.applications.probing.base import ProbeTask, Sample
from polyformer.core.errors import InputError, quote

TRIES = 20
"""Questions to try if their smallest prompt is too long, as for questions about long paragraphs."""

Start = Callable[[str], list[int]]
"""A function from a prompt to its token ids, with the special tokens before it."""


@dataclass(frozen=True)
class Prompt:
    """A sample as token ids."""

    sample: Sample
    ids: list[int]


@dataclass(frozen=True)
class PromptFormat:
    """The text of a prompt: `shots` demonstrations, then the sample.

    template: text with `{prompt}`, such as the format of an instruction-tuned model's messages. The beginning
    of the answer follows it.
    """

    template: str = "{prompt}"
    shots: int = 0

    def __post_init__(self) -> None:
        if self.template.count("{prompt}") != 1:
            raise InputError(f"template: expected {{prompt}} once in it, got {quote(self.template)}")

    def text(self, task: ProbeTask, units: int, key: str) -> tuple[str, Sample]:
        """Return the prompt and the sample of the seed `key`."""
        shown = [task.demonstration(random.Random(f"{key}/shot {n}")) for n in range(self.shots)]
        sample = task.sample(units, random.Random(key))
        demonstrations = "".join(f"{shot}\n\n" for shot in shown)
        before, after = self.template.split("{prompt}")
        prefix = sample.prefix.lstrip() if after[-1:].isspace() else sample.prefix
        return f"{before}{demonstrations}{sample.text}{after}{prefix}", sample


def fill(task: ProbeTask, start: Start, length: int, format: PromptFormat, key: str) -> Prompt:
    """Return the longest prompt of the seed `key` with which the answer also fits in `length` tokens.

    Raises `InputError` if the smallest prompt is longer.
    """
    room, shortest = length - task.new_tokens, None
    for number in range(TRIES):
        prompt = _longest(task, start, room, format, f"{key}/{number}")
        if isinstance(prompt, Prompt):
            return prompt
        shortest = min(prompt, shortest or prompt)
    raise InputError(
        f"the shortest prompt has {shortest} tokens and its answer up to {task.new_tokens}, got a length of "
        f"{length}; use a length of {(shortest or 0) + task.new_tokens} or more"
    )


def _longest(task: ProbeTask, start: Start, room: int, format: PromptFormat, key: str) -> Prompt | int:
    """Return the longest prompt of at most `room` tokens, or the tokens of the shortest prompt."""

    def prompt(units: int) -> Prompt:
        text, sample = format.text(task, units, key)
        return Prompt(sample, start(text))

    units, best = task.fewest, prompt(task.fewest)
    if len(best.ids) > room:
        return len(best.ids)
    most = room if task.most is None else task.most  # a unit has a token or more
    # Double the units until the prompt is too long, then bisect. More units have more tokens, except for a
    # few tokens, because words may differ; the result fits in any case.
    high, step = most + 1, 1
    while high - units > 1:
        middle = min(units + step, (units + high) // 2)
        longer = prompt(middle)
        if len(longer.ids) <= room:
            units, best, step = middle, longer, 2 * step
        else:
            high = middle
    return best
