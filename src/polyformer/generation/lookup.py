"""Prompt look-up: what followed the last tokens of a text when they stood in it before may follow again.

The last n tokens, for n from `ngram` down to 2, are looked for in the text so far, of an encoder-decoder in
its source too; the last place where they stand proposes what follows it. A text that has been repeating
itself is taken to go on so: past its end a proposal reads its own beginning. It costs comparisons of T
numbers a pass and no model. Saxena 2023, "Prompt lookup decoding". Deviations: the last place, where the
original takes the first; no proposal by a single token; drafts past the end.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from polyformer.core.state import State
from polyformer.generation.drafter import Drafts

SHORTEST = 2
"""Tokens that must have stood in the text before."""


@dataclasses.dataclass(frozen=True)
class Before(State):
    """What stands before the texts and may be copied from: [N, S], padding as -1."""

    tokens: Tensor


class Lookup:
    """Looks for at most the last `ngram` tokens. `paired`: of an encoder-decoder, in the source too."""

    def __init__(self, ngram: int, paired: bool):
        self.ngram, self.paired = ngram, paired

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
    ) -> Before:
        """The source of an encoder-decoder; nothing of a decoder alone, whose texts begin with the prompt."""
        if not self.paired:
            return Before(input_ids[:, :0])
        return Before(input_ids if attention_mask is None else input_ids.masked_fill(attention_mask == 0, -1))

    def propose(self, text: Tensor, count: int, memory: Before) -> tuple[Drafts, State]:
        """`count` tokens where the last ones of every row stood before, else none."""
        text = torch.cat([memory.tokens, text], 1)
        back = self.repeats(text)
        if not count or not len(back) or not bool(back.all()):
            return Drafts(text[:, :0]), memory
        ahead = torch.arange(count, device=text.device) % back.unsqueeze(1)
        drafts = text.gather(1, text.shape[1] - back.unsqueeze(1) + ahead)
        return Drafts(drafts.clamp_min(0)), memory  # padding behind a source

    def repeats(self, text: Tensor) -> Tensor:
        """How many tokens before the end of each row [N, T] its last tokens end for the time before: [N], 0
        where they have not stood in it."""
        length = text.shape[1]
        back = text.new_zeros(len(text))
        for size in range(min(self.ngram, length - 1), SHORTEST - 1, -1):
            last = text[:, -size:]
            same = (text[:, :-1].unfold(1, size, 1) == last.unsqueeze(1)).all(-1) & (last >= 0).all(1, True)
            ends = torch.arange(size, length, device=text.device)
            nearest = length - (same * ends).amax(1)
            back = torch.where((back == 0) & (nearest < length), nearest, back)
        return back
