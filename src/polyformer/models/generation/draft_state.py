"""The state of a model after reading texts with last tokens that may be rejected."""

import dataclasses
from typing import Self

from polyformer.core.state import State
from polyformer.models.generation.decoder import DecodingState


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
        return cls(state, length, before if state.truncated_(0) is None else None)

    def truncated_to(self, length: int) -> "DraftState":
        """Return a reading of at most the first `length` tokens; this reading must not be used afterwards."""
        if length >= self.length:
            return dataclasses.replace(self, before=None)
        shorter = self.state.truncated_(self.length - length)
        if shorter is not None:
            return DraftState(shorter, length)
        assert self.before is not None, "what is proposed is read after a reading that is right"
        return self.before.truncated_to(length)
