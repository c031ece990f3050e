"""What a model has read of texts whose last tokens may turn out to be wrong."""

import dataclasses
from typing import Self

from polyformer.core.state import State
from polyformer.generation.decoder import Progress


@dataclasses.dataclass(frozen=True)
class Reading(State):
    """The first `length` tokens of every text, read. before: fewer of them, for where `state` takes none back
    (`State.truncated_`); what is right among the tokens since is then read again."""

    state: Progress
    length: int
    before: "Reading | None" = None

    @classmethod
    def of(cls, state: Progress, length: int, before: "Reading | None" = None) -> Self:
        """With `before` only where it may be needed: it holds a state of its own."""
        return cls(state, length, before if state.truncated_(0) is None else None)

    def upto(self, length: int) -> "Reading":
        """At most the first `length` tokens; gives this reading up."""
        if length >= self.length:
            return dataclasses.replace(self, before=None)
        shorter = self.state.truncated_(self.length - length)
        if shorter is not None:
            return Reading(shorter, length)
        assert self.before is not None, "what is proposed is read after a reading that is right"
        return self.before.upto(length)
