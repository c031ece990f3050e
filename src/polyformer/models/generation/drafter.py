"""The interface of drafters, which propose next tokens for speculative decoding."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from polyformer.core.state import State


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
