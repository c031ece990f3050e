"""What speculative decoding asks for tokens that the model may write next, and what it gets."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from polyformer.core.state import State


@dataclasses.dataclass(frozen=True)
class Drafts(State):
    """Tokens [N, K] that may follow the texts, as many for every row. `probabilities` [N, K, V], where tokens
    were drawn: what each was drawn from."""

    tokens: Tensor
    probabilities: Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens. What it remembers is a state, whose rows come and go with the texts."""

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
    ) -> State:
        """Read the prompt, or the source: what it remembers. Arguments as for `Decoder.start`."""
        ...

    def propose(self, text: Tensor, count: int, memory: Any) -> tuple[Drafts, State]:
        """At most `count` tokens that may follow the texts [N, T], and what it remembers.

        The texts begin with the prompt, padding as -1, or with the token that an encoder-decoder's output
        starts from. It is asked before every pass of the model: the drafts of the time before that stand in
        the texts now were accepted, of the others none was, and the texts' last tokens are the model's own.
        """
        ...
