"""Prompt look-up: if the last tokens of a text occurred in it before, their continuation may occur again.

The last n tokens, for n from `ngram` down to 2, are searched in the text so far, for an encoder-decoder also
in its source; the continuation of the last occurrence is proposed. A proposal that reaches the end of the
text continues periodically: it repeats from its own beginning. It costs comparisons of T numbers per pass and
no model. Saxena 2023, "Prompt lookup decoding". Deviations: the last occurrence instead of the first; no
proposal from a single token; drafts past the end.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from polyformer.core.state import State
from polyformer.models.generation.drafter import Drafts

SHORTEST = 2
"""The least number of tokens that must occur earlier in the text."""


@dataclasses.dataclass(frozen=True)
class SourceTokens(State):
    """Tokens before the texts that may be copied: [N, S], padding as -1."""

    tokens: Tensor


class Lookup:
    """A drafter that searches for at most the last `ngram` tokens; `has_source`: also in an encoder-decoder's
    source.
    """

    def __init__(self, ngram: int, has_source: bool):
        self.ngram, self.has_source = ngram, has_source

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
    ) -> SourceTokens:
        """Return the source of an encoder-decoder; no tokens for a decoder-only model, as its texts begin
        with the prompt.
        """
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
