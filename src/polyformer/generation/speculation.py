"""Speculative decoding: tokens are proposed cheaply, and the model reads several of them in one pass.

    greedy       a draft stays if it is the token that the model writes there
    sampling     a draft drawn from q stays with probability min(1, p / q); in the place of the first one that
                 does not, a token is drawn from max(0, p - q), normalised

with p the distribution of the model and q that of the drafter, both as processors shape them. Texts follow
the model's own distribution, whatever is proposed. A draft that was not drawn, as from a look-up, has q = 1;
then drawing from p and looking whether the draft came out is the same, and a seed writes the text that it
writes without. Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.

The search knows nothing of it: `Speculator` answers its steps, token by token, from the pass that read the
drafts, as long as the tokens that the search chooses are the drafts. So ends, stop strings, processors and
streamers see each token as ever. Then the tokens that were read in vain are taken back (`State.truncated_`);
a state of sums cannot, and the accepted ones are read again, from the state before the pass, with the next
drafts.

The rows of a batch advance together, by as many drafts as the row that accepts fewest: with a share a of the
drafts right in each of B rows, a pass over k drafts writes (1 - a^(B(k+1))) / (1 - a^B) tokens a row.

Products of several tokens are rounded otherwise than those of a single one. Where the two likeliest tokens
are as likely but for the last bits, greedy search may so choose the other one, and the texts part there.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from polyformer.core.state import State
from polyformer.generation.decoder import Decoder, Start
from polyformer.generation.drafter import Drafter, Drafts
from polyformer.generation.generated import Drafted
from polyformer.generation.reading import Reading
from polyformer.generation.search import Choose, distribution

MOST_AGAIN = 16
"""Tokens that a pass reads again with drafts behind them; more are read alone, and all of them are read."""


@dataclasses.dataclass(frozen=True)
class Speculation(State):
    """The texts [N, T], what the model has read of them, and what it said to the drafts behind them: logits
    [N, K + 1, V], of which those at `place` are of the next token. memory: the drafter's."""

    text: Tensor
    reading: Reading
    logits: Tensor
    drafts: Drafts
    place: int
    memory: State


class Speculator:
    """Answers steps of a search from passes of `decoder` over the drafts of `drafter`.

    most: drafts of a pass. choose: how a token is chosen where no draft was drawn for its place; others draw
    from `generator`. drafted: what came of it so far.
    """

    def __init__(
        self,
        decoder: Decoder,
        drafter: Drafter,
        most: int,
        choose: Choose,
        generator: torch.Generator | None = None,
    ):
        self.decoder, self.drafter, self.most = decoder, drafter, most
        self.ordinary, self.generator = choose, generator
        self.end = 0
        self.proposed: tuple[Tensor, Tensor] | None = None
        self.drafted = Drafted()

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
    ) -> Start[Speculation]:
        """As `Decoder.start`."""
        start = self.decoder.start(input_ids, attention_mask, first, inputs)
        memory = self.drafter.start(input_ids, attention_mask, first, inputs)
        width = start.history.shape[1]
        self.end = width + self.decoder.room
        drafts = Drafts(start.history[:, :0])
        reading = Reading(start.state, width)
        state = Speculation(start.history, reading, start.logits.unsqueeze(1), drafts, 0, memory)
        return Start(start.logits, state, start.history)

    def step(self, tokens: Tensor, state: Speculation) -> tuple[Tensor, Speculation]:
        """As `Decoder.step`."""
        text, drafts, place = torch.cat([state.text, tokens.unsqueeze(1)], 1), state.drafts, state.place
        if place < drafts.tokens.shape[1] and torch.equal(tokens, drafts.tokens[:, place]):
            self.drafted = self.drafted.plus(accepted=len(tokens))
            state = dataclasses.replace(state, text=text, place=place + 1)
        else:
            state = self._pass(text, state)
        drafts, place = state.drafts, state.place
        self.proposed = None
        if drafts.probabilities is not None and place < drafts.tokens.shape[1]:
            self.proposed = drafts.tokens[:, place], drafts.probabilities[:, place]
        return state.logits[:, place], state

    def choose(self, logits: Tensor) -> Tensor:
        """One token a row [N] of the processed logits [N, V] that the last step led to."""
        if self.proposed is None:
            return self.ordinary(logits)
        return kept_or_drawn(distribution(logits), *self.proposed, self.generator)

    def _pass(self, text: Tensor, state: Speculation) -> Speculation:
        """Propose, and read what of the texts was not read, and the drafts."""
        reading, width = state.reading.upto(text.shape[1] - 1), text.shape[1]
        count = min(self.most, self.end - width - 1)
        if width - reading.length > MOST_AGAIN:
            count = 0
        drafts, memory = self.drafter.propose(text, count, state.memory)
        count = drafts.tokens.shape[1]
        unread = torch.cat([text[:, reading.length :], drafts.tokens], 1)
        logits, after = self.decoder.read(unread, reading.state, count + 1)
        self.drafted = self.drafted.plus(proposed=drafts.tokens.numel(), passes=1)
        return Speculation(text, Reading.of(after, width + count, reading), logits, drafts, 0, memory)


def kept_or_drawn(p: Tensor, drafts: Tensor, q: Tensor, generator: torch.Generator | None) -> Tensor:
    """Tokens [N] that follow p [N, V], the `drafts` [N] drawn from q [N, V] wherever they can stay."""
    index = drafts.unsqueeze(1)
    chance = torch.rand(index.shape, generator=generator, dtype=p.dtype, device=p.device)
    stays = chance * q.gather(1, index) < p.gather(1, index)
    rest = (p - q).clamp_min(0)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)  # equal distributions: every draft stays
    return torch.where(stays, index, torch.multinomial(rest, 1, generator=generator)).squeeze(1)
