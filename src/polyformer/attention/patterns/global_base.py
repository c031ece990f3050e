"""Bases of the patterns with global tokens: the rule, its intervals, and its half for keys only."""

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import runs
from polyformer.attention.patterns.layout import Interval, Keys, clip
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

Side = Literal["q", "kv"]


@dataclasses.dataclass(frozen=True)
class GlobalPattern(Pattern, named=False):
    """A few tokens see everything and are seen by everything; `is_global` selects them."""

    def with_tables(self, context: Context, device: torch.device) -> "GlobalPattern":
        """Return the same global tokens, with their tables if they need any."""
        return self

    def is_global(self, context: Context, side: Side, b: Tensor, index: Tensor) -> Tensor:
        """Return whether the queries or keys `index` of batch rows `b` are global; the indices broadcast."""
        raise NotImplementedError

    def static_slots(self, context: Context, side: Side) -> Keys | None:
        """Return the global queries or keys if they can be computed without reading a tensor, else None."""
        return None

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return chosen(i) or chosen(j)."""
        return self.is_global(context, "q", b, q_idx) | self.is_global(context, "kv", b, kv_idx)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return every key for global queries and the global keys for all others."""
        queries, keys = self.runs(context, "q"), self.runs(context, "kv")
        everything = ((0, context.kv_len),)
        if queries is None or keys is None:
            return Keys(everything)
        # Rows end at the edges of global runs, so usually all queries of a row are global or none.
        inside = any(a < stop and start < b for a, b in queries.some)
        whole = any(a <= start and stop <= b for a, b in queries.full)
        return Keys(everything if inside else keys.some, everything if whole else keys.full)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the starts and ends of the runs of global queries."""
        queries = self.runs(context, "q")
        return () if queries is None else tuple(edge for run in queries.some for edge in run)

    def runs(self, context: Context, side: Side) -> Keys | None:
        """Return the queries or keys that are global in some and in all batch rows.

        None while a graph is traced, if they are not `static_slots`.
        """
        slots = self.static_slots(context, side)
        if slots is not None or torch.compiler.is_compiling():  # a tensor cannot be read while tracing
            return slots
        # Read on the CPU once per call; all layers share the result.
        return context.once((self, side), lambda: self._runs(context, side))

    def _runs(self, context: Context, side: Side) -> Keys:
        rows, length = context.num_rows, context.q_len if side == "q" else context.kv_len
        b, index = torch.arange(rows).unsqueeze(1), torch.arange(length)
        flags = self.is_global(context, side, b, index).expand(rows, length).cpu()
        return Keys(runs(flags.any(0)), runs(flags.all(0)))


@dataclasses.dataclass(frozen=True)
class FirstPositions(GlobalPattern, named=False):
    """The first `tokens` positions of each document."""

    tokens: int

    def is_global(self, context: Context, side: Side, b: Tensor, index: Tensor) -> Tensor:
        """Return whether position < tokens."""
        position = context.query_position if side == "q" else context.key_position
        return position(b, index) < self.tokens

    def static_slots(self, context: Context, side: Side) -> Keys | None:
        """Return the first slots if positions are slots, else None."""
        positions, length, start = (
            (context.q_pos, context.q_len, context.offset)
            if side == "q"
            else (context.kv_pos, context.kv_len, 0)
        )
        if positions is not None:
            return None
        first = clip(0, self.tokens - start, length)
        return Keys(first, first)


@dataclasses.dataclass(frozen=True)
class DocumentEndPattern(GlobalPattern, named=False):
    """Global tokens that depend on the end of their document, which no causal query can know."""

    causal_error: ClassVar[str]

    def causal(self) -> bool:
        """Return False: the end of a document is unknown until it is complete."""
        return False

    def table(self, context: Context, side: Side) -> Tensor:
        """Return which queries or keys are global, [B or 1, T]."""
        raise NotImplementedError

    def global_slots(self, context: Context, start: int, length: int) -> tuple[Interval, ...]:
        """Return the global slots among `length` slots from `start` on, in one document without padding."""
        raise NotImplementedError

    def is_global(self, context: Context, side: Side, b: Tensor, index: Tensor) -> Tensor:
        """Look up `index` in a table for the whole context."""
        device = index.device
        # Tables of one call, in which all heads and layers look up their indices.
        lookups = context.once((self, "tables", device), lambda: self.with_tables(context, device))
        return lookups.is_global(context, side, b, index)

    def with_tables(self, context: Context, device: torch.device) -> "GlobalTables":
        """Return the lookups in both tables."""
        self._check(context)
        query, key = (self.table(context, side).to(device, non_blocking=True) for side in ("q", "kv"))
        return GlobalTables(query, key)

    def static_slots(self, context: Context, side: Side) -> Keys | None:
        """Return `global_slots` if the context has no documents, padding or positions, else None."""
        self._check(context)
        tables = context.q_pos, context.kv_pos, context.kv_doc, context.kv_valid
        if any(table is not None for table in tables):
            return None
        start, length = (context.offset, context.q_len) if side == "q" else (0, context.kv_len)
        slots = self.global_slots(context, start, length)
        return Keys(slots, slots)

    def _check(self, context: Context) -> None:
        if context.causal:
            raise InputError(f"{type(self).__name__}: {self.causal_error}")


@dataclasses.dataclass(frozen=True, eq=False)
class GlobalTables(GlobalPattern, named=False):
    """Global queries and keys in tables [B or 1, Tq] and [B or 1, Tk] of bool."""

    query_table: Tensor
    key_table: Tensor

    def is_global(self, context: Context, side: Side, b: Tensor, index: Tensor) -> Tensor:
        """Return the entries of `index` in the table of the side."""
        table = self.query_table if side == "q" else self.key_table
        return table[0, index] if table.shape[0] == 1 else table[b, index]


@dataclasses.dataclass(frozen=True)
class GlobalKeys(Pattern, named=False):
    """The global tokens of a pattern as keys only: every query sees them, but they do not see more."""

    tokens: GlobalPattern

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return chosen(j)."""
        # The first factor is always True; it adds the axis of the queries.
        return (q_idx >= 0) & self.tokens.is_global(context, "kv", b, kv_idx)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the global keys, the same for every query."""
        return self.tokens.runs(context, "kv") or super().keys(context, start, stop)

    def with_tables(self, context: Context, device: torch.device) -> Pattern:
        """Return the global keys with the tables of the tokens."""
        return dataclasses.replace(self, tokens=self.tokens.with_tables(context, device))
