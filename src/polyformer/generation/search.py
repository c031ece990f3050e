"""Greedy search and sampling: one token after another, every row on its own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from polyformer.core.state import State
from polyformer.generation.constraints import Processor
from polyformer.generation.decoder import Start
from polyformer.generation.generated import SearchResult
from polyformer.generation.processors import process
from polyformer.generation.stopping import Stopping

S = TypeVar("S", bound=State)

Choose = Callable[[Tensor], Tensor]
"""Processed logits [N, V] to one token a row [N]."""


def distribution(logits: Tensor) -> Tensor:
    """Processed logits [N, V] as probabilities, in single precision."""
    return logits.float().softmax(-1)


def drawn(generator: torch.Generator | None) -> Choose:
    """Sampling by a generator, by default torch's own for the device."""
    return lambda logits: torch.multinomial(distribution(logits), 1, generator=generator).squeeze(1)


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """What holds at every step. `pad` fills texts that ended; `streamer` receives each step's tokens [N]."""

    max_new_tokens: int
    pad: int
    processors: Sequence[Processor]
    stopping: Stopping
    streamer: Callable[[Tensor], None] | None = None


class Steps(Protocol[S]):
    """What reads the tokens of a search."""

    def step(self, tokens: Tensor, state: S) -> tuple[Tensor, S]:
        """As `Decoder.step`."""
        ...


def search(decoder: Steps[S], start: Start[S], rules: Rules, choose: Choose, copies: int) -> SearchResult:
    """`copies` texts for every input, each token by `choose`. A row that has ended leaves the batch."""
    rows = torch.arange(len(start.logits), device=start.logits.device).repeat_interleave(copies)
    logits, state, history = start.logits, start.state, start.history
    if copies > 1:
        logits, state, history = logits[rows], state.reorder(rows), history[rows]
    count, prompt = len(rows), history.shape[1]
    text = torch.cat([history, history.new_zeros(count, rules.max_new_tokens)], 1)
    output = history.new_full((count, rules.max_new_tokens), rules.pad)
    lengths, scores = (
        history.new_zeros(count),
        logits.new_zeros(count, dtype=torch.promote_types(logits.dtype, torch.float32)),
    )
    alive: Tensor | slice = slice(None)  # which rows are still written; as an index it costs more
    for step in range(rules.max_new_tokens):
        now = prompt + step
        token = choose(process(rules.processors, logits, text[:, :now]))
        text[:, now] = token
        output[alive, step] = token
        lengths[alive] += 1
        scores[alive] += log_probability(logits.to(scores.dtype), token)
        if rules.streamer is not None:
            rules.streamer(output[:, step])
        ended = rules.stopping.ended(text[:, prompt : now + 1])
        if step + 1 == rules.max_new_tokens or bool(ended.all()):
            break
        if bool(ended.any()):
            stay = (~ended).nonzero().squeeze(1)
            alive = stay if isinstance(alive, slice) else alive[stay]
            text, token, state = text[stay], token[stay], state.reorder(stay)
        logits, state = decoder.step(token, state)
    return SearchResult(output, lengths, scores)


def log_probability(logits: Tensor, token: Tensor) -> Tensor:
    """log softmax(logits [N, V]) at token [N]."""
    return logits.log_softmax(-1).gather(1, token.unsqueeze(1)).squeeze(1)  # faster than logsumexp
