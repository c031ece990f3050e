"""Retrieval of neighbours during generation, for a model with the head `semiparametric` (SPALM)."""

import dataclasses

import torch
from torch import Tensor

from polyformer.applications.retrieval.store import Store
from polyformer.core.errors import InputError
from polyformer.core.evaluation_mode import evaluating
from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelState
from polyformer.nn.stack.last_feedforward import LastFeedForwardInput


@dataclasses.dataclass(frozen=True, eq=False)
class Retrieval:
    """The argument of `generate(retrieval=)`: a frozen `model` and the `store` that was built with it.

    The model reads every token next to the generating model. Its context is the whole text so far, not a
    window.
    """

    model: Transformer
    store: Store
    neighbours: int = 4

    def start(
        self, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
    ) -> tuple[Tensor, ModelState]:
        """Read the prompt [N, T]; return the neighbours [N, 1, k] of its last token and the state.

        `max_new_tokens` tokens follow. Raises `InputError` if the model cannot read that many tokens.
        """
        assert self.model.decoder is not None
        if self.neighbours < 1:
            raise InputError(f"--neighbours: expected 1 or more, got {self.neighbours}")
        length = input_ids.shape[1] + max_new_tokens
        limit = self.model.decoder.position.max_positions
        if limit is not None and length > limit:
            raise InputError(
                f"max_new_tokens: the frozen model reads {limit} tokens, and prompt and text have {length}"
            )
        return self._read(input_ids, attention_mask, self.model.new_state(length), 1)

    def read(self, tokens: Tensor, state: ModelState, last: int) -> tuple[Tensor, ModelState]:
        """Read tokens [N, T] after `state`; return neighbours [N, K, k] of the `last` K, and the state."""
        return self._read(tokens, None, state, last)

    @torch.no_grad()
    def _read(
        self, ids: Tensor, mask: Tensor | None, state: ModelState, last: int
    ) -> tuple[Tensor, ModelState]:
        with evaluating(self.model), LastFeedForwardInput(self.model.decoder) as read:  # type: ignore[arg-type]
            after = self.model(ids, attention_mask=mask, state=state).state
            keys = read.value[:, -last:].half().float()  # with the rounding of the store
        near = self.store.search(keys.flatten(0, 1), self.neighbours)
        tokens = near.values.masked_fill(near.distances.isinf(), -1)
        return tokens.view(*keys.shape[:2], -1), after
