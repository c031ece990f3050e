"""The inputs of a model, the tokens of each row over all calls, and the keys that later tokens read.

`ModelInputs` has the token ids of a text and optional data per token; `Tokens` the validity, positions and
documents of all calls so far; `Reach` how far back queries read: the keys that a decoder must keep.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import host_values, remember
from polyformer.core.sequence.context import Context, SequenceShard, without_keys
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, eq=False)
class ModelInputs:
    """A text, or the source of an encoder-decoder; a field is None if it is not given.

    Args:
        input_ids: [B, T], the text; the source of an encoder-decoder.
        attention_mask: [B, T], 1 for non-padding tokens and 0 for padding, on either side.
        position_ids: [B, T], [1, T] or [T]; by default non-padding tokens are counted from 0 in every
            document.
        document_ids: [B, T], not decreasing: documents packed in one row do not attend to one another.
        token_type_ids, langs: [B, T] or [1, T], if the model has token types or languages.
        segment_ids: [B, T], the sentence (or other part) of each token, for structured patterns and
            positions; for the source of an encoder-decoder.
        global_attention_mask: [B, T], 1 for tokens that the pattern `Marked()` makes global; with a state
            for the new tokens; for the source of an encoder-decoder.
        relation_ids: [B, T, T], a label of the relation of each token (axis 1) to each token (axis 2), -1 for
            none, if the position scheme embeds them; with a state [B, T, all tokens so far].
        inputs_embeds: [B, T, E], token vectors instead of the ids, as wide as the token table.
        source_spans: [B, U, 2], the first and the last source position, counted without padding, that each
            position of the target may read, for the pattern `SourceSpans()` of an encoder-decoder; given with
            the source for the whole target; its later positions have the last span.
    """

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    token_type_ids: Tensor | None = None
    langs: Tensor | None = None
    segment_ids: Tensor | None = None
    global_attention_mask: Tensor | None = None
    relation_ids: Tensor | None = None
    inputs_embeds: Tensor | None = None
    source_spans: Tensor | None = None

    def with_placeholder_ids(self, name: str = "inputs_embeds", choices: bool = False) -> "ModelInputs":
        """Return these inputs with zeros as ids if the caller gave token vectors as `name` instead.

        The vectors may be [B, C, T, E] if there may be `choices`.
        """
        vectors = self.inputs_embeds
        if vectors is None:
            return self
        if self.input_ids is not None or vectors.dim() not in ((3, 4) if choices else (3,)):
            other = "ids too" if self.input_ids is not None else tuple(vectors.shape)
            raise InputError(f"{name}: expected [batch, length, width] in place of the ids, got {other}")
        return dataclasses.replace(self, input_ids=vectors.new_zeros(vectors.shape[:-1], dtype=torch.long))

    def with_all_rows(self) -> "ModelInputs":
        """Return these inputs with every [1, T] row of numbers expanded to the ids [B, T]."""
        ids, rows = self.input_ids, {}
        if not isinstance(ids, Tensor):
            return self
        for name in ("position_ids", "token_type_ids", "langs"):
            numbers = getattr(self, name)
            if isinstance(numbers, Tensor) and numbers.shape == (1, *ids.shape[1:]):
                rows[name] = numbers.expand_as(ids)
        return dataclasses.replace(self, **rows) if rows else self

    def local_part(self, shard: SequenceShard) -> "ModelInputs":
        """Return the tokens of one process, without `relation_ids`, which are per pair."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in fields.items():
            if value is not None:
                fields[name] = shard.take(value, 1 if name == "inputs_embeds" else -1)
        return ModelInputs(**{**fields, "relation_ids": None})

    def with_choices_as_rows(self) -> "tuple[ModelInputs, int]":
        """Return the texts [B, C, T] of C choices per question as rows [B C, T], and C."""
        ids = self.input_ids
        assert ids is not None
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in fields.items():
            if value is not None and value.shape[:2] == ids.shape[:2]:
                fields[name] = value.flatten(0, 1)
        return ModelInputs(**fields), ids.shape[1]

    @property
    def is_plain(self) -> bool:
        """Whether the tokens are real, counted from 0, and of one document and segment without marks."""
        tables = self.attention_mask is self.position_ids is self.document_ids is self.segment_ids is None
        return tables and self.global_attention_mask is None

    @property
    def text_ids(self) -> Tensor | None:
        """The ids [B, T]; None if they are only placeholders for token vectors."""
        return self.input_ids if self.inputs_embeds is None else None


def expected_ids(name: str, value: object) -> InputError:
    """Return the error for an argument that is not a tensor of token ids."""
    way_out = ""
    if isinstance(value, str | list | tuple):
        way_out = "; a tokenizer makes ids of a text: torch.tensor([tokenizer.encode(text)])"
    return InputError(f"{name}: expected token ids [batch, length], got {quote(value)}{way_out}")


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
            return Context.of_lengths(new, self.length, causal)
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
