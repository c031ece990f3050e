"""Greedy search, sampling and contrastive search: one token after another, each row independently.

Contrastive search: likely tokens with a hidden state that is not too similar to the text so far.

    x_t = argmax over the k most likely v of  (1 - alpha) p(v | x_<t) - alpha max_{j < t} cos(h_v, h_j)

h_v is the model's last hidden state after reading v, and h_j the last hidden states of the text so far,
including the prompt (for an encoder-decoder, with a separate source text, of its output). Every step reads
the k candidates of each text in one pass. Su et al. 2022 (A contrastive framework for neural text
generation), section 4.2.

p is the model's distribution after the processors; tokens that they forbid are never chosen.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.state import State
from polyformer.models.generation.config import ContrastiveConfig
from polyformer.models.generation.constraints import Processor
from polyformer.models.generation.decoder import Decoder, DecodingStart, DecodingState
from polyformer.models.generation.processors import process
from polyformer.models.generation.results import SearchResult, Stopping

S = TypeVar("S", bound=State)

# Processed logits [N, V] to one token per row [N].
Choose = Callable[[Tensor], Tensor]


def distribution(logits: Tensor) -> Tensor:
    """Return processed logits [N, V] as probabilities, in single precision."""
    return logits.float().softmax(-1)


def sampler(generator: torch.Generator | None) -> Choose:
    """Return a function that samples with a generator, by default torch's for the device."""
    return lambda logits: torch.multinomial(distribution(logits), 1, generator=generator).squeeze(1)


@dataclasses.dataclass(frozen=True, eq=False)
class SearchSettings:
    """Settings of all steps. `pad` fills finished texts; `streamer` receives each step's tokens [N]."""

    max_new_tokens: int
    pad: int
    processors: Sequence[Processor]
    stopping: Stopping
    streamer: Callable[[Tensor], None] | None = None


class StepDecoder(Protocol[S]):
    """The interface of the model in a search."""

    def step(self, tokens: Tensor, state: S) -> tuple[Tensor, S]:
        """Read tokens as `Decoder.step` does."""
        ...


class GrowingTexts:
    """The texts of a search: one text after each row of `history` [N, T]; a row leaves when its text ends.

    copies: number of rows for each input.
    """

    def __init__(self, history: Tensor, rules: SearchSettings, dtype: torch.dtype, copies: int = 1):
        count, self.prompt = history.shape
        self.inputs = [row // copies for row in range(count)]  # of the active rows
        self.rules, self.step = rules, 0
        self.text = torch.cat([history, history.new_zeros(count, rules.max_new_tokens)], 1)
        self.output = history.new_full((count, rules.max_new_tokens), rules.pad)  # of the rows that have left
        self.lengths = history.new_zeros(count)
        single = torch.promote_types(dtype, torch.float32)
        self.scores = torch.zeros(count, dtype=single, device=history.device)
        self.alive: Tensor | slice = slice(None)  # the active rows; an index tensor is slower than a slice

    @property
    def tokens(self) -> Tensor:
        """The active rows, including the prompt."""
        return self.text[:, : self.prompt + self.step]

    def add(self, token: Tensor, logits: Tensor) -> Tensor | slice | None:
        """Append the tokens [A] chosen by the logits [A, V].

        Returns the rows that continue; None if there are none.
        """
        now = self.prompt + self.step
        self.text[:, now] = token
        # Of the model's own distribution, before the processors.
        self.scores[self.alive] += log_probability(logits.to(self.scores.dtype), token)
        if self.rules.streamer is not None:
            self.rules.streamer(self._of_all_rows(token))
        self.step += 1
        if self.step == self.rules.max_new_tokens:
            return None
        if not self.rules.stopping.can_end:
            return slice(None)
        ended = self.rules.stopping.ended(self.text[:, self.prompt : now + 1], self.inputs)
        count = int(ended.count_nonzero())  # a GPU waits here, once per token
        if count == len(ended):
            return None
        if not count:
            return slice(None)
        stay = (~ended).nonzero().squeeze(1)
        self._store()  # of the rows that leave this is the last time
        self.alive = stay if isinstance(self.alive, slice) else self.alive[stay]
        self.text = self.text[stay]
        self.inputs = [self.inputs[row] for row in stay.tolist()]
        return stay

    def _store(self) -> None:
        """Copy the new tokens of the active rows to the output."""
        self.output[self.alive, : self.step] = self.text[:, self.prompt : self.prompt + self.step]
        self.lengths[self.alive] = self.step

    def _of_all_rows(self, token: Tensor) -> Tensor:
        """Return the tokens [A] of the active rows with `pad` for the others: [N]."""
        if isinstance(self.alive, slice):
            return token
        return token.new_full((len(self.output),), self.rules.pad).index_copy_(0, self.alive, token)

    def result(self) -> SearchResult:
        """Return all rows, in their order."""
        self._store()
        return SearchResult(self.output, self.lengths, self.scores)


def search(
    decoder: StepDecoder[S], start: DecodingStart[S], rules: SearchSettings, choose: Choose, copies: int
) -> SearchResult:
    """Generate `copies` texts for every input, each token by `choose`. A finished row leaves the batch."""
    logits, state, history = start.logits, start.state, start.history
    if copies > 1:
        # The prompt is read once for all samples.
        rows = torch.arange(len(logits), device=logits.device).repeat_interleave(copies)
        logits, state, history = logits[rows], state.reorder(rows), history[rows]
    texts = GrowingTexts(history, rules, logits.dtype, copies)
    while True:
        token = choose(process(rules.processors, logits, texts.tokens))
        stay = texts.add(token, logits)
        if stay is None:
            return texts.result()
        # Nothing is copied while all rows continue.
        if not isinstance(stay, slice):
            token, state = token[stay], state.reorder(stay)
        logits, state = decoder.step(token, state)


def log_probability(logits: Tensor, token: Tensor) -> Tensor:
    """Return log softmax(logits [N, V]) at token [N]."""
    return -F.cross_entropy(logits, token, reduction="none")  # one operation, where gathering takes four


def contrastive_search(
    decoder: Decoder, start: DecodingStart[DecodingState], rules: SearchSettings, config: ContrastiveConfig
) -> SearchResult:
    """Generate one text for every input. A finished row leaves the batch."""
    logits, state, count = start.logits, start.state, min(config.candidates, start.logits.shape[1])
    texts = GrowingTexts(start.history, rules, logits.dtype)
    past = F.normalize(decoder.hidden, dim=-1).masked_fill((start.history < 0).unsqueeze(2), torch.nan)
    while True:
        probabilities = distribution(process(rules.processors, logits, texts.tokens))
        confidence, candidates = probabilities.topk(count)  # [N, k]
        # One pass reads the candidates of all texts: [N k].
        copies = torch.arange(len(logits), device=logits.device).repeat_interleave(count)
        following, looked = decoder.step(candidates.flatten(), state.reorder(copies))
        hidden = F.normalize(decoder.hidden, dim=-1).view(len(logits), count, -1)
        choice = contrast(confidence, hidden, past, config.penalty_alpha).argmax(1, keepdim=True)
        stay = texts.add(candidates.gather(1, choice).squeeze(1), logits)
        if stay is None:
            return texts.result()
        # The rows of the chosen candidates that are read already.
        rows = (choice.squeeze(1) + count * torch.arange(len(logits), device=logits.device))[stay]
        past = torch.cat([past[stay], hidden.flatten(0, 1)[rows].unsqueeze(1)], 1)
        logits, state = following[rows], looked.reorder(rows)


def contrast(confidence: Tensor, hidden: Tensor, past: Tensor, alpha: float) -> Tensor:
    """Return the values [N, k] of candidates of these probabilities [N, k] and directions [N, k, E].

    past: [N, T, E], the directions of the text so far, NaN at padding. The value is -inf for probability 0.
    """
    likeness = torch.einsum("nke,nte->nkt", hidden, past).nan_to_num(-torch.inf).amax(2)
    value = (1 - alpha) * confidence - alpha * likeness
    return value.masked_fill(confidence == 0, -torch.inf)
