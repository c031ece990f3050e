"""The tokens of each row over any number of calls: validity, positions, documents."""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.host_values import host_values, remember
from polyformer.core.sequence.context import Context, without_keys
from polyformer.core.sequence.inputs import ModelInputs
from polyformer.core.sequence.sequence_shards import SequenceShard
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True)
class Tokens(State):
    """The last T tokens of each row, with the data that later calls need.

    length: T. dropped: the number of earlier tokens, no longer stored. first: how many of the T tokens come
    before the dropped tokens instead, as the first tokens of the row. valid: [B, T] bool, or None if all are
    real. pos: [B, T], or None if they are counted from `dropped`. doc: [B, T] document numbers, not
    decreasing along a row, or None for one document. segment: [B, T] numbers of the parts of a document, or
    None for one part. marked: [B, T] bool, the tokens that the caller made global. merged: how many of the
    first tokens each represent several tokens, in a compressed memory.
    """

    length: int
    valid: Tensor | None = None
    pos: Tensor | None = None
    doc: Tensor | None = None
    segment: Tensor | None = None
    marked: Tensor | None = None
    dropped: int = 0
    merged: int = 0
    first: int = 0

    @property
    def seen(self) -> int:
        """The number of tokens of a row so far, padding included."""
        return self.dropped + self.length

    @property
    def has_tables(self) -> bool:
        """Whether anything besides the number of tokens is known."""
        return not (self.valid is self.pos is self.doc is self.segment is self.marked is None)

    def extended(self, inputs: ModelInputs) -> "Tokens":
        """Return these tokens followed by the tokens of `inputs`.

        The attention mask may cover the new tokens or all tokens so far. By default each row's non-padding
        tokens are counted from 0 in every document, document and segment numbers repeat the last number, and
        no token is global.
        """
        ids, mask = inputs.input_ids, inputs.attention_mask
        assert ids is not None
        rows, new = ids.shape
        length = self.length + new
        if not self.has_tables and inputs.is_plain:
            return Tokens(length, dropped=self.dropped, merged=self.merged, first=self.first)
        if mask is not None and mask.shape[-1] == self.seen + new and self.seen:
            valid: Tensor | None = without_keys(mask, self.first, self.first + self.dropped).bool()
            if self.merged:  # merged tokens have no column in the mask
                ends = valid.new_ones(rows, self.length) if self.valid is None else self.valid
                valid = torch.cat([ends[:, : self.merged], valid[:, self.merged :]], 1)
        else:
            real = (
                None
                if mask is None or _all_valid(mask)
                else _as_bools(_check_shape("attention_mask", mask, ids))
            )
            valid = _concatenate(self.valid, real, (rows, self.length), ids, torch.ones, torch.bool)
        doc = self._numbers("document_ids", self.doc, inputs.document_ids, ids)
        fresh = inputs.document_ids is not None
        numbers = host_values(doc) if fresh and doc is not None else None
        if numbers is not None and bool((numbers.diff() < 0).any()):
            raise InputError("document_ids: expected numbers that do not decrease along a row")
        segment = self._numbers("segment_ids", self.segment, inputs.segment_ids, ids)
        marks = inputs.global_attention_mask
        marks = None if marks is None else _check_shape("global_attention_mask", marks, ids).bool()
        marked = _concatenate(self.marked, marks, (rows, self.length), ids, torch.zeros, torch.bool)
        pos = self._positions(ids, inputs.position_ids, valid, doc)
        return Tokens(length, valid, pos, doc, segment, marked, self.dropped, self.merged, self.first)

    def local_part(self, shard: SequenceShard) -> "Tokens":
        """Return the tokens of one process."""
        return dataclasses.replace(self.map(shard.take), length=shard.length)

    def last_kept(self, count: int) -> "Tokens":
        """Return the last `count` tokens, as a memory keeps them; for 0 only the number of tokens so far."""
        if count >= self.length:
            return self
        if not count:
            return Tokens(0, dropped=self.seen)
        kept = self.map(lambda tensor: tensor[:, -count:])
        return dataclasses.replace(kept, length=count, dropped=self.seen - count)

    def kept(self, first: int, count: int) -> "Tokens":
        """Return only the first `first` and the last `count` tokens; all tokens if they have no tables."""
        tables = [x for x in (self.valid, self.pos, self.doc, self.segment, self.marked) if x is not None]
        if self.length - count <= first or not tables:
            return self
        return self.positioned(len(tables[0]), tables[0].device)._kept(first, count)

    def positioned(self, rows: int, device: torch.device) -> "Tokens":
        """Return these tokens with a table of positions, for `rows` rows."""
        if self.pos is not None:
            return self
        slots = torch.arange(self.dropped, self.seen, device=device)
        return dataclasses.replace(self, pos=slots.expand(rows, -1))

    def _kept(self, first: int, count: int) -> "Tokens":
        start = self.length - count
        kept = self.map(lambda table: without_keys(table, first, start).clone())
        dropped = self.dropped + start - first
        return dataclasses.replace(kept, length=first + count, dropped=dropped, first=first)

    def truncated_(self, count: int) -> "Tokens | None":
        """Remove the last `count` tokens; None if they are not stored."""
        if count > self.length:
            return None
        kept = slice(0, self.length - count)
        shorter = self.map(lambda tensor: tensor[:, kept])
        return dataclasses.replace(shorter, length=kept.stop)

    def _numbers(self, name: str, past: Tensor | None, new: Tensor | None, ids: Tensor) -> Tensor | None:
        """Return the numbers [B, T] of these tokens and the `new` ones; by default the last repeats."""
        new = None if new is None else _check_shape(name, new, ids)
        if new is None and past is not None:
            new = past[:, -1:].expand(ids.shape)
        return _concatenate(past, new, (ids.shape[0], self.length), ids, torch.zeros, torch.long)

    def _positions(
        self, ids: Tensor, new_positions: Tensor | None, valid: Tensor | None, doc: Tensor | None
    ) -> Tensor | None:
        """Return the positions of these tokens and the new ones, [B, T]; None while they equal the slots."""
        rows, new = ids.shape
        if new_positions is None and self.pos is None and valid is None and doc is None:
            return None
        past = self.pos
        if past is None:
            past = torch.arange(self.dropped, self.seen, device=ids.device).expand(rows, -1)
        if new_positions is not None:
            following = _check_shape("position_ids", new_positions.expand(rows, -1), ids)
        else:
            counted = _count_positions(rows, self.length + new, valid, doc, ids.device)
            following = self._continued(past, counted, doc, new)
        return torch.cat([past, following], 1)

    def _continued(self, past: Tensor, counted: Tensor, doc: Tensor | None, new: int) -> Tensor:
        """Return the positions of the last `new` tokens: `counted`, shifted to continue a given `past`."""
        following = counted[:, -new:]
        if (self.pos is None and not self.dropped) or not self.length:
            return following
        shift = past[:, -1:] - counted[:, self.length - 1 : self.length]
        if doc is not None:
            shift = torch.where(doc[:, -new:] == doc[:, self.length - 1 : self.length], shift, 0)
        return following + shift

    def last(self, new: int, device: torch.device) -> Tensor:
        """Return the positions of the last `new` tokens: [B, new], or [new] if they equal the slots."""
        if self.pos is not None:
            return self.pos[:, -new:]
        return torch.arange(self.seen - new, self.seen, device=device)

    def context(self, new: int, causal: bool, device: torch.device | None = None) -> Context:
        """Return the context of the last `new` tokens attending to all of these tokens."""
        if not self.dropped and not self.has_tables:
            return Context(new, self.length, causal)
        pos, doc, segment, marked = self.pos, self.doc, self.segment, self.marked
        if pos is None and self.dropped:  # slots are counted from the first token that is stored
            pos = torch.arange(self.dropped, self.seen, device=device)
        return Context(
            new,
            self.length,
            causal=causal,
            q_pos=None if pos is None else pos[..., -new:],
            kv_pos=pos,
            q_doc=_last(doc, new),
            kv_doc=doc,
            q_segment=_last(segment, new),
            kv_segment=segment,
            kv_valid=self.valid,
            q_marked=_last(marked, new),
            kv_marked=marked,
            prefix=self.first,
            skipped=self.dropped if self.first else 0,
        )

    def new_valid(self, new: int) -> Tensor | None:
        """Return which of the last `new` tokens are real, [B, new]; None if all are."""
        return _last(self.valid, new)


NO_TOKENS = Tokens(0)
"""The state before the first token."""


def _count_positions(
    rows: int, length: int, valid: Tensor | None, doc: Tensor | None, device: torch.device
) -> Tensor:
    """Return positions [B, T]: non-padding tokens counted in every document; padding repeats them."""
    real = torch.ones(rows, length, dtype=torch.long, device=device) if valid is None else valid.long()
    count = real.cumsum(1)
    if doc is not None:
        starts = torch.ones_like(doc, dtype=torch.bool)
        starts[:, 1:] = doc[:, 1:] != doc[:, :-1]
        count = count - torch.where(starts, count - real, 0).cummax(1).values
    return (count - 1).clamp_min(0)


def _last(table: Tensor | None, new: int) -> Tensor | None:
    """Return the last `new` columns of a table; if these are all, the table, with its `host_values`."""
    return table if table is None or table.shape[1] == new else table[:, -new:]


def _as_bools(mask: Tensor) -> Tensor:
    """Return the mask as bools, with its `host_values`."""
    values = host_values(mask)
    return remember(mask.bool(), None if values is None else values.bool())


def _all_valid(mask: Tensor) -> bool:
    """Return whether the mask hides nothing, if this is cheap to find out."""
    values = host_values(mask)
    return values is not None and bool(values.all())


def _check_shape(name: str, numbers: Tensor, ids: Tensor) -> Tensor:
    if numbers.shape != ids.shape:
        raise InputError(
            f"{name}: expected the shape of the ids {tuple(ids.shape)}, got {tuple(numbers.shape)}"
        )
    return numbers


def _concatenate(
    past: Tensor | None,
    new: Tensor | None,
    past_shape: tuple[int, int],
    ids: Tensor,
    default,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return past and new entries, with defaults for a missing part; None if both are missing.

    Without past entries the result has the `host_values` of the new.
    """
    if past is None and new is None:
        return None
    values = None if new is None or past_shape[1] else host_values(new)
    past = default(*past_shape, dtype=dtype, device=ids.device) if past is None else past
    new = default(*ids.shape, dtype=dtype, device=ids.device) if new is None else new.to(dtype)
    return remember(torch.cat([past, new], 1), values)
