"""What may be done to the logits of the next token before one is chosen."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyformer.generation.config import SamplingConfig

Processor = Callable[[Tensor, Tensor], Tensor]
"""(logits [N, V], the text so far [N, T]) -> logits [N, V]; the input is left as it was."""


def process(processors: Sequence[Processor], logits: Tensor, history: Tensor) -> Tensor:
    """`logits` after all `processors`, in their order."""
    for processor in processors:
        logits = processor(logits, history)
    return logits


def repetition_penalty(penalty: float) -> Processor:
    """Positive logits of the history's tokens divided by `penalty`, negative ones multiplied.

    Keskar et al. 2019 (CTRL), section 4.1, in the form that also works below zero.
    """

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        seen = logits.gather(1, history)
        return logits.scatter(1, history, torch.where(seen > 0, seen / penalty, seen * penalty))

    return apply


def no_end_before(length: int, eos: int) -> Processor:
    """The token `eos` is out of the question until the history has `length` tokens."""

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        if history.shape[1] >= length:
            return logits
        return logits.index_fill(1, torch.tensor([eos], device=logits.device), -torch.inf)

    return apply


def temperature(value: float) -> Processor:
    """Logits divided by `value`: below 1 sharpens the distribution, above 1 flattens it."""
    return lambda logits, history: logits / value


def top_k(count: int) -> Processor:
    """Only the `count` likeliest tokens (and any as likely as the last of them)."""

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        least = logits.topk(min(count, logits.shape[1])).values[:, -1:]
        return logits.masked_fill(logits < least, -torch.inf)

    return apply


def top_p(mass: float) -> Processor:
    """Only the fewest likeliest tokens whose probabilities reach `mass`. Holtzman et al. 2020, 3.1."""

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        ranked, order = logits.sort(descending=True)
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of all likelier tokens; exactly 0 for the first
        beyond = before >= mass
        return logits.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)

    return apply


def sampling_processors(config: SamplingConfig) -> list[Processor]:
    """Temperature, then top-k, then top-p, as far as they are asked for."""
    chosen = [temperature(config.temperature)] if config.temperature != 1.0 else []
    chosen += [top_k(config.top_k)] if config.top_k is not None else []
    chosen += [top_p(config.top_p)] if config.top_p is not None and config.top_p < 1.0 else []
    return chosen
