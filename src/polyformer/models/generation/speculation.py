"""Speculative decoding: tokens are proposed cheaply, and the model reads several of them in one pass.

    greedy       a draft is accepted if it is the token that the model would generate
    sampling     a draft drawn from q is accepted with probability min(1, p / q); the first rejected draft is
                 replaced by a token drawn from max(0, p - q), normalised

p is the distribution of the model and q the distribution of the drafter, both after the processors. Texts
follow the model's distribution, for any proposals. A draft that was not drawn, for example from a look-up,
has q = 1; drawing from p and comparing the result with the draft is then equivalent, and a seed gives the
same text as without drafts. Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.

The search is not aware of speculation: `Speculator` answers its steps, token by token, from the pass that
read the drafts, as long as the search chooses the drafts. So ends, stop strings, processors and streamers see
each token as usual. Tokens that were read in vain are then removed (`State.truncated_`). A state of sums
cannot remove tokens, so the accepted tokens are read again with the next drafts, from the state before the
pass.

The rows of a batch advance together, by the number of drafts that the worst row accepts: with a share a of
correct drafts in each of B rows, a pass over k drafts generates (1 - a^(B(k+1))) / (1 - a^B) tokens per row.

Products of several tokens are rounded differently from products of a single token. If the two most likely
tokens differ only in the last bits, greedy search may choose the other token, and the texts differ from there
on.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from polyformer.core.state import State
from polyformer.models.generation.decoder import Decoder, DecodingStart
from polyformer.models.generation.drafter import Drafter, Drafts, DraftState
from polyformer.models.generation.results import DraftStatistics
from polyformer.models.generation.search import Choose, distribution

# The most tokens that a pass reads again together with drafts; more are read in a separate pass.
MAX_REREAD_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Speculation(State):
    """The state of speculative decoding."""

    text: Tensor  # [N, T]
    reading: DraftState  # of the model, for a part of the text
    logits: Tensor  # [N, K + 1, V], of the model after the text and after each draft
    drafts: Drafts
    place: int  # the next token uses the logits here
    memory: State  # the drafter's


class Speculator:
    """A reader that answers the steps of a search from passes of `decoder` over drafts of `drafter`.

    most: drafts per pass. choose: chooses tokens at places without a drawn draft; other tokens are drawn with
    `generator`. drafted: the statistics so far.
    """

    def __init__(
        self,
        decoder: Decoder,
        drafter: Drafter,
        max_drafts: int,
        choose: Choose,
        generator: torch.Generator | None = None,
    ):
        self.decoder, self.drafter, self.max_drafts = decoder, drafter, max_drafts
        self.fallback, self.generator = choose, generator
        self.end = 0
        self.proposed: tuple[Tensor, Tensor] | None = None
        self.drafted = DraftStatistics()

    def start(self, *reads: Any) -> DecodingStart[Speculation]:
        """Read the inputs as `Decoder.start` does."""
        start = self.decoder.start(*reads)
        memory = self.drafter.start(*reads)
        width = start.history.shape[1]
        self.end = width + self.decoder.max_new_tokens
        drafts = Drafts(start.history[:, :0])
        reading = DraftState(start.state, width)
        state = Speculation(start.history, reading, start.logits.unsqueeze(1), drafts, 0, memory)
        return DecodingStart(start.logits, state, start.history)

    def step(self, tokens: Tensor, state: Speculation) -> tuple[Tensor, Speculation]:
        """Read tokens as `Decoder.step` does."""
        text, drafts, place = torch.cat([state.text, tokens.unsqueeze(1)], 1), state.drafts, state.place
        if place < drafts.tokens.shape[1] and torch.equal(tokens, drafts.tokens[:, place]):
            self.drafted = self.drafted.add(accepted=len(tokens))
            state = dataclasses.replace(state, text=text, place=place + 1)
        else:
            state = self._pass(text, state)
        drafts, place = state.drafts, state.place
        self.proposed = None
        if drafts.probabilities is not None and place < drafts.tokens.shape[1]:
            self.proposed = drafts.tokens[:, place], drafts.probabilities[:, place]
        return state.logits[:, place], state

    def choose(self, logits: Tensor) -> Tensor:
        """Return one token per row [N] for the processed logits [N, V] of the last step."""
        if self.proposed is None:
            return self.fallback(logits)
        return accept_or_resample(distribution(logits), *self.proposed, self.generator)

    def _pass(self, text: Tensor, state: Speculation) -> Speculation:
        """Propose drafts, and read the unread part of the texts and the drafts."""
        reading, width = state.reading.truncated_to(text.shape[1] - 1), text.shape[1]
        # The last token of a text needs no draft after it.
        count = min(self.max_drafts, self.end - width - 1)
        # The next pass only catches up.
        if width - reading.length > MAX_REREAD_TOKENS:
            count = 0
        drafts, memory = self.drafter.propose(text, count, state.memory)
        count = drafts.tokens.shape[1]
        unread = torch.cat([text[:, reading.length :], drafts.tokens], 1)
        logits, after = self.decoder.read(unread, reading.state, count + 1)
        self.drafted = self.drafted.add(proposed=drafts.tokens.numel(), passes=1)
        return Speculation(text, DraftState.of(after, width + count, reading), logits, drafts, 0, memory)


def accept_or_resample(p: Tensor, drafts: Tensor, q: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return tokens [N] distributed as p [N, V], using the `drafts` [N] drawn from q [N, V] if accepted."""
    index = drafts.unsqueeze(1)
    chance = torch.rand(index.shape, generator=generator, dtype=p.dtype, device=p.device)
    # Chance < min(1, p / q), without a division by 0.
    stays = chance * q.gather(1, index) < p.gather(1, index)
    rest = (p - q).clamp_min(0)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)  # equal distributions: every draft is accepted
    return torch.where(stays, index, torch.multinomial(rest, 1, generator=generator)).squeeze(1)
