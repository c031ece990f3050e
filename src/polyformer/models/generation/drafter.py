"""Drafters propose next tokens for speculative decoding: a look-up in the text, or a small model."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from polyformer.core.sequence.reach import MARGIN
from polyformer.core.state import State
from polyformer.models.generation.constraints import Processor
from polyformer.models.generation.decoder import Decoder, DecodingState, GenerativeModel
from polyformer.models.generation.processors import process
from polyformer.models.generation.search import Choose, distribution


@dataclasses.dataclass(frozen=True)
class Drafts(State):
    """Tokens [N, K] that may follow the texts, the same number for every row.

    probabilities: [N, K, V], the distributions from which the tokens were drawn; None if they were not drawn.
    """

    tokens: Tensor
    probabilities: Tensor | None = None


class Drafter(Protocol):
    """The interface of drafters. Their memory is a state with one row per text."""

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
        /,
    ) -> State:
        """Read the prompt or the source and return the memory. Arguments as for `Decoder.start`."""
        ...

    def propose(self, text: Tensor, count: int, memory: Any) -> tuple[Drafts, State]:
        """Propose at most `count` tokens that may follow the texts [N, T], and return the next memory too.

        The texts begin with the prompt, padding as -1, or with the start token of an encoder-decoder's
        output. This is called before every pass of the model: earlier drafts that are now in the texts were
        accepted, all others were rejected, and the last token of each text was chosen by the model.
        """
        ...


# The least number of tokens that must occur earlier in the text.
SHORTEST = 2


@dataclasses.dataclass(frozen=True)
class SourceTokens(State):
    """Tokens before the texts that may be copied: [N, S], padding as -1."""

    tokens: Tensor


class Lookup:
    """Prompt look-up: if the last tokens of a text occurred in it before, their continuation may occur again.

    The last n tokens, for n from `ngram` down to 2, are searched in the text so far, for an encoder-decoder
    (`has_source`) also in its source; the continuation of the last occurrence is proposed. A proposal that
    reaches the end of the text continues periodically: it repeats from its own beginning. It costs
    comparisons of T numbers per pass and no model. Saxena 2023, "Prompt lookup decoding". Deviations: the
    last occurrence instead of the first; no proposal from a single token; drafts past the end.
    """

    def __init__(self, ngram: int, has_source: bool):
        self.ngram, self.has_source = ngram, has_source

    def start(self, input_ids: Tensor, attention_mask: Tensor | None, *_: Any) -> SourceTokens:
        """Return the source of an encoder-decoder; a decoder's texts begin with the prompt themselves."""
        if not self.has_source:
            return SourceTokens(input_ids[:, :0])
        return SourceTokens(
            input_ids if attention_mask is None else input_ids.masked_fill(attention_mask == 0, -1)
        )

    def propose(self, text: Tensor, count: int, memory: SourceTokens) -> tuple[Drafts, State]:
        """Propose `count` tokens if the last tokens of every row occurred before, else none."""
        text = torch.cat([memory.tokens, text], 1)
        back = self.repeats(text)
        if not count or not len(back) or not bool(back.all()):
            return Drafts(text[:, :0]), memory
        ahead = torch.arange(count, device=text.device) % back.unsqueeze(1)
        drafts = text.gather(1, text.shape[1] - back.unsqueeze(1) + ahead)
        return Drafts(drafts.clamp_min(0)), memory  # padding behind a source

    def repeats(self, text: Tensor) -> Tensor:
        """Return the distance [N] from the end of each row [N, T] to the previous occurrence of its last
        tokens.

        The distance is 0 if there is no earlier occurrence.
        """
        length = text.shape[1]
        back = text.new_zeros(len(text))
        for size in range(min(self.ngram, length - 1), SHORTEST - 1, -1):
            last = text[:, -size:]
            same = (text[:, :-1].unfold(1, size, 1) == last.unsqueeze(1)).all(-1) & (last >= 0).all(1, True)
            ends = torch.arange(size, length, device=text.device)
            nearest = length - (same * ends).amax(1)
            back = torch.where((back == 0) & (nearest < length), nearest, back)
        return back


@dataclasses.dataclass(frozen=True)
class DraftState(State):
    """The state after reading the first `length` tokens of every text.

    before: an earlier reading, for a `state` that cannot remove tokens (`State.truncated_`); the accepted
    tokens after it are then read again.
    """

    state: DecodingState
    length: int
    before: "DraftState | None" = None

    @classmethod
    def of(cls, state: DecodingState, length: int, before: "DraftState | None" = None) -> Self:
        """Return a reading that keeps `before` only if it may be needed, as it holds another state."""
        few = before is None or length - before.length <= MARGIN
        return cls(state, length, None if few and state.truncated_(0) is not None else before)

    def truncated_to(self, length: int) -> "DraftState":
        """Return a reading of at most the first `length` tokens; this reading must not be used afterwards."""
        if length >= self.length:
            return dataclasses.replace(self, before=None)
        shorter = self.state.truncated_(self.length - length)
        if shorter is not None:
            return DraftState(shorter, length)
        assert self.before is not None, "what is proposed is read after a reading that is right"
        return self.before.truncated_to(length)


class DraftModel:
    """A drafter that generates with a small `model`, with the same `processors` and `choose` as the text.

    It costs a pass of the small model for every token proposed. samples: `choose` draws, and the drafts
    include their distributions. Leviathan et al. 2023, section 2; Chen et al. 2023, section 2.
    """

    def __init__(
        self,
        model: GenerativeModel,
        max_new_tokens: int,
        processors: Sequence[Processor],
        choose: Choose,
        samples: bool,
    ):
        self.decoder = Decoder(model, max_new_tokens)
        self.processors, self.choose, self.samples = processors, choose, samples

    def start(self, *reads: Any) -> DraftState:
        """Read the prompt or the source."""
        start = self.decoder.start(*reads)
        return DraftState.of(start.state, start.history.shape[1])

    def propose(self, text: Tensor, count: int, memory: DraftState) -> tuple[Drafts, DraftState]:
        """Propose `count` tokens, one after another."""
        width, probabilities = text.shape[1], []
        # The last token was chosen by the model and is not read yet.
        memory, sure = memory.truncated_to(width - 1), None
        for _ in range(count):
            logits, state = self.decoder.read(text[:, memory.length :], memory.state, 1)
            memory = DraftState.of(state, text.shape[1], sure)
            # The state before any of these drafts.
            sure = sure or memory
            logits = process(self.processors, logits.squeeze(1), text)
            token = self.choose(logits)
            if self.samples:
                probabilities.append(distribution(logits))
            text = torch.cat([text, token.unsqueeze(1)], 1)
        drawn = torch.stack(probabilities, 1) if probabilities else None
        return Drafts(text[:, width:], drawn), memory
