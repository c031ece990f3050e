"""How far back queries read: the keys that a decoder must keep for later tokens."""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.sequence.context import Context

BLOCK = 64
"""Keys are dropped in blocks of this many slots, so that the copies of the others cost little per token."""

MARGIN = 64
"""Keys kept in addition, so that as many tokens can be removed again (`State.truncated_`)."""


@dataclasses.dataclass(frozen=True)
class Reach:
    """The earlier keys that a query may read; a superset is correct.

    last: the farthest distance. It counts slots or, with `by_position`, positions, which differ at padding.
    first: the number of first positions of a document that every later query may read too.
    """

    last: int
    first: int = 0
    by_position: bool = False

    def __or__(self, other: "Reach") -> "Reach":
        return Reach(
            max(self.last, other.last), max(self.first, other.first), self.by_position or other.by_position
        )

    def __and__(self, other: "Reach") -> "Reach":
        # Either contains the intersection.
        return min(self, other, key=lambda reach: reach.last + reach.first)

    @property
    def most(self) -> int:
        """The greatest number of keys before a single query that `kept` keeps, in a text without padding."""
        return self.first + self.last + MARGIN + BLOCK

    def in_slots(self, context: Context) -> "Reach | None":
        """Return the reach of a context's queries in slots, with `first` as a number of first slots.

        None if the positions of a row decrease, as in packed documents: first positions then have no fixed
        slots. None too while a graph is traced, where positions cannot be read.
        """
        positions = context.kv_pos
        if not (self.first or self.by_position) or (positions is None and context.kv_doc is None):
            return self
        if context.kv_doc is not None or positions is None or torch.compiler.is_compiling():
            return None
        if bool((positions.diff() < 0).any()):
            return None
        first = _most(positions < self.first) if self.first else 0
        last = self.last
        if self.by_position and context.q_pos is not None:
            # Slots from the farthest key of the first query on, and padding among the queries.
            start, stop = context.q_pos[..., :1], context.q_pos[..., -1:]
            before = positions[..., : context.offset] >= start - last
            last = max(last, _most(before) + context.q_len - 1 - int((stop - start).min()))
        return Reach(last, first)

    def kept(self, before: int) -> int:
        """Return how many of the last of `before` slots are kept for a query after them; a reach in slots."""
        return before - max(0, before - self.last - MARGIN) // BLOCK * BLOCK


def _most(flags: Tensor) -> int:
    """Return the greatest number of flags in a row of [T] or [B, T]."""
    return int(flags.sum(-1, dtype=torch.long).max()) if flags.numel() else 0


def union(reaches: "list[Reach | None]") -> Reach | None:
    """Return the reach of several parts together; None if any reads all keys."""
    combined: Reach | None = None
    for reach in reaches:
        if reach is None:
            return None
        combined = reach if combined is None else combined | reach
    return combined
