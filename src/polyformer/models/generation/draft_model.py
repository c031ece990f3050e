"""A draft model: a small model with the same vocabulary proposes its continuation.

It costs a pass of the small model for every token proposed. Leviathan et al. 2023, section 2; Chen et al.
2023, section 2.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyformer.models.generation.constraints import Processor
from polyformer.models.generation.decoder import Decoder, GenerativeModel
from polyformer.models.generation.draft_state import DraftState
from polyformer.models.generation.drafter import Drafts
from polyformer.models.generation.processors import process
from polyformer.models.generation.search import Choose, distribution


class DraftModel:
    """A drafter that generates with `model`, with the same `processors` and `choose` as the text.

    room: the greatest number of tokens. samples: `choose` draws, and the drafts include their distributions.
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

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
    ) -> DraftState:
        """Read the prompt or the source."""
        start = self.decoder.start(input_ids, attention_mask, first, inputs)
        return DraftState.of(start.state, start.history.shape[1])

    def propose(self, text: Tensor, count: int, memory: DraftState) -> tuple[Drafts, DraftState]:
        """Propose `count` tokens, one after another."""
        width, probabilities = text.shape[1], []
        memory, sure = memory.truncated_to(width - 1), None
        for _ in range(count):
            logits, state = self.decoder.read(text[:, memory.length :], memory.state, 1)
            memory = DraftState.of(state, text.shape[1], sure)
            sure = sure or memory
            logits = process(self.processors, logits.squeeze(1), text)
            token = self.choose(logits)
            if self.samples:
                probabilities.append(distribution(logits))
            text = torch.cat([text, token.unsqueeze(1)], 1)
        drawn = torch.stack(probabilities, 1) if probabilities else None
        return Drafts(text[:, width:], drawn), memory
