"""The cost of a step: how its time grows with the length of a row, and its peak memory."""

import dataclasses
import math
from collections.abc import Callable

import torch

from polyformer.core.measuring import time_once
from polyformer_lab.members import pictures, questions
from polyformer_lab.members.listing import Row
from polyformer_lab.members.questions import Rows
from polyformer_lab.members.trial import Budget, backward, model
from polyformer_lab.memory import peak_mib

LENGTHS = 512, 2048
"""The lengths of the row from whose times the slope is computed; an image has the next smaller square."""

MEMORY_LENGTH, WARM_LENGTH = 1024, 64
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Step:
    """Forward and backward of a row's model, for a text or image of `length` tokens."""

    row: Row
    budget: Budget
    length: int


def step(case: Step) -> Callable[[], None]:
    """Return the call with its model and its tokens."""
    generator = torch.Generator().manual_seed(0)
    image = case.row.table == "image"
    length = math.isqrt(case.length) ** 2 if image else case.length
    vocabulary = pictures.LEVELS if image else questions.VOCABULARY
    trained = model(case.row, case.budget, length, vocabulary).train()
    batch = _random(case.row, length, generator)

    def call() -> None:
        trained.zero_grad(set_to_none=True)
        backward(trained, case.row, batch)

    return call


def slope(row: Row, budget: Budget) -> float:
    """Return the exponent of n in the time of forward and backward, between the two `LENGTHS`."""
    seconds = []
    for length in LENGTHS:
        call = step(Step(row, budget, length))
        call()
        seconds.append(min(time_once(call) for _ in range(REPEATS)))
    return math.log(seconds[1] / seconds[0]) / math.log(LENGTHS[1] / LENGTHS[0])


def mebibytes(row: Row, budget: Budget) -> float:
    """Return the peak memory of forward and backward for a row of `MEMORY_LENGTH` tokens."""
    case, warm = (Step(row, budget, length) for length in (MEMORY_LENGTH, WARM_LENGTH))
    return peak_mib(step, case, warm, "cpu")


def _random(row: Row, length: int, generator: torch.Generator) -> Rows:
    if row.table == "image":
        return pictures.as_rows(torch.randint(pictures.LEVELS, (1, length), generator=generator))
    text = torch.randint(questions.HIDDEN, (2 * length,), generator=generator)
    return questions.questions(text, 1, length, row.table, generator)
