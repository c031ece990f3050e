"""The context of an attention call: slots, positions, documents and validity of its tokens, and their image.

A *slot* is an index into the key tensor; a *position* is a token's place in its document. Inside a document
positions increase by one per slot, so a difference of slots is a difference of positions. Caches, memories
and left padding therefore need no offset arithmetic anywhere else.

Each process of a context-parallel group holds some slots of a long sequence, its shard. `contiguous`: process
p of P holds the p-th part. `balanced`: of 2 P parts process p holds p and 2 P - 1 - p, so that with causal
attention all processes compute equally many pairs of query and key.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.modules import names_wrong_fields

Run = tuple[int, int]
"""Slots start <= i < stop."""


def contiguous(length: int, processes: int) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of every process: one part each, with lengths that differ by at most 1."""
    return tuple((part,) for part in _parts(length, processes))


def balanced(length: int, processes: int) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of every process: an early and a late part each.

    Brandon et al. 2023 (Striped Attention) balance by single tokens; the report of Llama 3, section 3.3.2, by
    two chunks, as here.
    """
    parts = _parts(length, 2 * processes)
    return tuple((parts[p], parts[2 * processes - 1 - p]) for p in range(processes))


def _parts(length: int, count: int) -> list[Run]:
    return [(i * length // count, (i + 1) * length // count) for i in range(count)]


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceShard:
    """The slots of one process among the processes of its group.

    group: the torch process group over which the sequence is sharded. rank: this process in the group. runs:
    the runs of every process, in increasing order, which is the order of its tokens. strategy: how keys reach
    the processes that hold the queries that need them: "needed", "ring", "all" or "auto"
    (`attention/functional/context_parallel/`).
    source: the runs of another sequence that the queries attend to, for every process; None for
    self-attention.
    """

    group: Any
    rank: int
    runs: tuple[tuple[Run, ...], ...]
    strategy: str = "auto"
    source: tuple[tuple[Run, ...], ...] | None = None

    @property
    def key_runs(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of keys that every process holds."""
        return self.runs if self.source is None else self.source

    @property
    def key_shard(self) -> "SequenceShard":
        """The shard of the keys: of the source, or this shard."""
        return (
            self if self.source is None else SequenceShard(self.group, self.rank, self.source, self.strategy)
        )

    def with_source(self, source: "SequenceShard") -> "SequenceShard":
        """Return a shard of this process's queries and of the keys that it holds of `source`."""
        return dataclasses.replace(self, source=source.runs)

    @property
    def local_runs(self) -> tuple[Run, ...]:
        """The runs of this process."""
        return self.runs[self.rank]

    @property
    def length(self) -> int:
        """The number of slots that this process holds."""
        return sum(stop - start for start, stop in self.local_runs)

    def slots(self, device: torch.device) -> Tensor:
        """Return the slot of each token that this process holds, [T]."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.local_runs])

    def take(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the part of x, which has all slots along `dim`, that belongs to this process."""
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.local_runs], dim)


class Image(NamedTuple):
    """`first` tokens outside the image, such as a class token, followed by height x width patches.

    The patches are in raster order. Patterns and position schemes for images read the sizes here.
    """

    first: int
    height: int
    width: int

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.first + self.height * self.width


T = TypeVar("T")

TABLES = "pos", "doc", "segment", "marked"
"""Tables that exist both for queries (`q_pos`) and for keys (`kv_pos`)."""

BY_ROW = *(f"{side}_{table}" for table in TABLES for side in ("q", "kv")), "kv_valid", "relations", "q_spans"
"""The fields that may differ from one batch row to the next."""


Bare = tuple[int, int, int, bool, Image | None]
"""A context without tables: q_len, kv_len, offset, causal and image."""


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """The queries and keys of one attention call.

    Args:
        q_len, kv_len: lengths Tq and Tk.
        causal: a query sees only its slot and earlier slots.
        q_start: the slot of the first query among the keys; by default the queries are the last Tq of the
            Tk keys (bottom-right alignment, as a KV cache needs). For keys of another sequence (patterns such
            as `Aligned`) the slot in the queries' own sequence. A tensor with one number in a compiled
            graph that does not know the number; patterns and schemes then work for pairs, without a layout.
        q_pos, kv_pos: positions, [Tq] or [B, Tq] and likewise for keys; by default the slots.
        q_doc, kv_doc: document numbers [B, Tq] and [B, Tk], not decreasing along a row; a query sees only
            its document.
        q_segment, kv_segment: [B, Tq] and [B, Tk], numbers of the sentences (or other parts of a
            document) of the tokens, for structured patterns and schemes; by default there is one segment.
        kv_valid: [B, Tk] bool, False where a key is padding.
        q_marked, kv_marked: [B, Tq] and [B, Tk] bool, the tokens that the caller marked as global.
        distance_range: the least and greatest distance that a pattern allows, if known.
        q_spans: [B, 2, Tq], the first and the last key position that each query may see, for `SourceSpans`.
        relations: [B, Tq, Tk] labels of pairs of tokens, for schemes that embed them.
        image: the image that the tokens are patches of; None for any other sequence.
        prefix, skipped: the first `prefix` keys are followed by `skipped` slots without keys (`kept`), which
            indices do not count. No pattern may limit distances to more than the keys after these slots.
        last_position: the scores treat queries at later positions as if they were at this position; None for
            no limit. Patterns do not use it.
        shard, whole: with context parallelism, the slots of this process and the context of the whole
            sequence (`shard_sequence`). Indices of queries then count the tokens of this process; indices of
            keys, in `distance`, `key_position`, `same_segment` and `relations`, count all slots.
    """

    q_len: int
    kv_len: int
    causal: bool = False
    q_start: int | None = None
    q_pos: Tensor | None = None
    kv_pos: Tensor | None = None
    q_doc: Tensor | None = None
    kv_doc: Tensor | None = None
    q_segment: Tensor | None = None
    kv_segment: Tensor | None = None
    kv_valid: Tensor | None = None
    q_marked: Tensor | None = None
    kv_marked: Tensor | None = None
    relations: Tensor | None = None
    q_spans: Tensor | None = None
    distance_range: tuple[int, int] | None = None
    image: Image | None = None
    prefix: int = 0
    skipped: int = 0
    last_position: int | None = None
    shard: SequenceShard | None = None
    whole: "Context | None" = None
    memo: dict[Hashable, Any] = dataclasses.field(default_factory=dict, repr=False)  # cache of `once`

    tables: tuple[Tensor, ...] = dataclasses.field(default=(), init=False, repr=False)
    versions: list[int] = dataclasses.field(default_factory=list, init=False, repr=False)
    # All that the context says if these are numbers; None if it has tables or is part of a longer sequence.
    numbers: Hashable = dataclasses.field(default=None, init=False, repr=False)

    @names_wrong_fields
    def __post_init__(self) -> None:
        values = self.__dict__
        values["tables"] = tuple([values[name] for name in BY_ROW if values[name] is not None])
        if not (self.tables or self.shard or self.whole or isinstance(self.q_start, Tensor)):
            lengths = self.q_len, self.kv_len, self.q_start, self.prefix, self.skipped
            limits = self.causal, self.distance_range, self.last_position, self.image
            values["numbers"] = lengths, limits
        for name in BY_ROW if self.tables else ():
            length = self.q_len if name.startswith("q_") else self.kv_len
            if name == "relations" and self.whole is not None:  # columns are all slots, on every process
                length = self.whole.kv_len
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[-1] != length:
                shape = tuple(tensor.shape)
                raise InputError(f"{name}: expected {length} entries per row, got shape {shape}")
        for name, other in (("q_doc", "kv_doc"), ("q_segment", "kv_segment")):
            if (getattr(self, name) is None) != (getattr(self, other) is None):
                raise InputError(f"{name} and {other}: expected both or neither")

    @staticmethod
    def of_lengths(q_len: int, kv_len: int, causal: bool) -> "Context":
        """Return a context without tables, as most calls have.

        Every pass makes one, so only what differs from the defaults is set, and nothing is checked.
        """
        context = object.__new__(Context)
        numbers = (q_len, kv_len, None, 0, 0), (causal, None, None, None)
        context.__dict__.update(
            q_len=q_len, kv_len=kv_len, causal=causal, memo={}, versions=[], numbers=numbers
        )
        return context

    @property
    def offset(self) -> int:
        """The slot of the first query."""
        return self.kv_len - self.q_len if self.q_start is None else self.q_start

    @property
    def q_valid(self) -> Tensor | None:
        """[B, Tq] bool, False where a query is padding; None if there is no padding."""
        if self.kv_valid is None:
            return None
        first = self.offset
        if isinstance(first, Tensor):
            slots = first + torch.arange(self.q_len, device=first.device)
            return self.kv_valid.index_select(1, slots).bool()
        return self.kv_valid[:, first : first + self.q_len].bool()

    @property
    def num_rows(self) -> int:
        """The number of different batch rows in the tables; 1 if all rows are alike."""
        tables = [x for name in BY_ROW if (x := getattr(self, name)) is not None]
        return max([1, *(len(x) for x in tables if x.dim() > 1)])

    def rows(self, start: int, stop: int) -> "Context":
        """Return the context of the batch rows start <= b < stop; this context if all rows are alike."""
        tables = {name: x for name in BY_ROW if (x := getattr(self, name)) is not None}
        own = {name: x[start:stop] for name, x in tables.items() if x.dim() > 1}
        if not own:
            return self
        whole = None if self.whole is None else self.whole.rows(start, stop)
        changes = {**own, "whole": whole}
        return self.once(("rows", start, stop), lambda: dataclasses.replace(self, memo={}, **changes))

    def mapped(
        self, queries: Callable[[Tensor], Tensor], keys: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Return the tables of queries and of keys, `relations` among the latter, after these functions."""
        tables = {name: x for name in BY_ROW if (x := getattr(self, name)) is not None}
        return {name: queries(x) if name.startswith("q_") else keys(x) for name, x in tables.items()}

    @property
    def bare(self) -> Bare | None:
        """Lengths, offset, causality and image; None if the context has any tables."""
        if any(getattr(self, name) is not None for name in (*BY_ROW, "last_position")):
            return None
        if not isinstance(self.offset, int):
            return None
        return self.q_len, self.kv_len, self.offset, self.causal, self.image

    @staticmethod
    def from_bare(bare: Bare) -> "Context":
        """Return a context of these numbers, without tables."""
        q_len, kv_len, offset, causal, image = bare
        return Context(q_len, kv_len, causal=causal, q_start=offset, image=image)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, computed once per context, as all layers share layouts and masks."""
        if torch.compiler.is_compiling():  # tracing shares repeated work and must not change the context
            return make()
        memo = self.recalled()
        if key not in memo:
            memo[key] = make()
        return memo[key]

    def recalled(self) -> dict[Hashable, Any]:
        """Return `memo`, emptied if a table was written to since (inference mode does not track this)."""
        if self.tables:
            versions = [0 if x.is_inference() else x._version for x in self.tables]
            if versions != self.versions:
                self.memo.clear()
                self.versions[:] = versions
        return self.memo

    def distance(self, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the slots from the key to the query: 0 is the query's slot, later keys are negative."""
        distance = self.index_distance(q_idx, kv_idx)
        return distance + self.skipped * (kv_idx < self.prefix) if self.skipped else distance

    def index_distance(self, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the distance without skipped slots, which tables by distance (`Relative`) use."""
        if (shard := self.shard) is not None:
            return self.once("slots", lambda: shard.slots(kv_idx.device))[q_idx] - kv_idx
        return q_idx + self.offset - kv_idx

    def entry_distance(self, b: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the distances by which tables of relative terms are indexed, for batch rows `b`."""
        if self.last_position is None:
            return self.index_distance(q_idx, kv_idx)
        return self.query_position(b, q_idx).clamp_max(self.last_position) - self.key_position(b, kv_idx)

    def between_positions(
        self, target: "Context", kv_pos: Tensor | None = None, spans: Tensor | None = None
    ) -> "Context":
        """Return this context of queries in one sequence and keys in another, with the positions of both.

        target: the context of the queries within their own sequence. kv_pos: [B, Tk]; by default the keys
        that are not padding are counted from 0. spans: [B, U, 2] by position, the last for later positions.
        """
        if kv_pos is None and self.kv_valid is not None:
            kv_pos = positions_from_mask(self.kv_valid)
        moved = dataclasses.replace(self, memo={}, q_start=target.offset, q_pos=target.q_pos, kv_pos=kv_pos)
        if spans is None:
            return moved
        rows, device = torch.arange(len(spans), device=spans.device).view(-1, 1), spans.device
        place = moved.query_position(rows, torch.arange(self.q_len, device=device)).clamp_max(
            spans.shape[1] - 1
        )
        return dataclasses.replace(moved, memo={}, q_spans=spans[rows, place].mT)

    @property
    def all_as_queries(self) -> "Context":
        """The same tokens with all keys as queries too, to rotate them by their positions."""
        if self.q_len == self.kv_len:
            return self
        changes = {f"q_{name}": getattr(self, f"kv_{name}") for name in TABLES}
        return self.once(
            "all as queries",
            lambda: dataclasses.replace(
                self, memo={}, q_len=self.kv_len, q_start=None, relations=None, **changes
            ),
        )

    def kept(self, first: int, last: int, device: torch.device) -> "Context":
        """Return the context of only the first `first` and the last `last` keys; itself if these are all."""
        start = self.kv_len - last
        if start <= first:
            return self
        return self.once(("kept", first, last), lambda: self._kept(first, start, device))

    def _kept(self, first: int, start: int, device: torch.device) -> "Context":
        changes = self.mapped(lambda x: x, lambda x: without_keys(x, first, start))
        if self.kv_pos is None:  # positions were slots
            slots = torch.arange(start, self.kv_len, device=device)
            changes["kv_pos"] = torch.cat([torch.arange(first, device=device), slots]) if first else slots
        q_pos, dropped = self.q_pos, start - first
        if q_pos is None:
            q_pos = changes["kv_pos"].narrow(-1, self.offset - dropped, self.q_len)
        return dataclasses.replace(
            self,
            memo={},
            kv_len=self.kv_len - dropped,
            q_start=None if self.q_start is None else self.q_start - dropped,
            prefix=first,
            skipped=dropped + self.skipped if first else 0,
            **{**changes, "q_pos": q_pos},
        )

    @property
    def distances(self) -> tuple[int, int]:
        """The least and the greatest distance that a query may see; the least is 0 for a causal context."""
        of = self.whole or self
        first, greatest = of.offset, of.offset + of.q_len - 1 + of.skipped
        if isinstance(first, Tensor):  # in a graph the queries may be at any of the keys
            first, greatest = 0, of.kv_len - 1
        least = 0 if of.causal else first - of.kv_len + 1
        if self.distance_range is not None:
            least, greatest = max(least, self.distance_range[0]), min(greatest, self.distance_range[1])
        return least, max(least, greatest)

    def within_distances(self, distance_range: tuple[int, int] | None) -> "Context":
        """Return this context restricted to distances of this range; the context itself for None."""
        if distance_range is None:
            return self
        return self.once(
            ("distance_range", distance_range),
            lambda: dataclasses.replace(self, memo={}, distance_range=distance_range),
        )

    def up_to_position(self, last: int, distance_range: tuple[int, int]) -> "Context":
        """Return this context with `last_position`, and the range of the distances that this leaves."""
        return self.once(
            ("last_position", last, distance_range),
            lambda: dataclasses.replace(self, memo={}, last_position=last, distance_range=distance_range),
        )

    def query_position(self, b: Tensor, q_idx: Tensor) -> Tensor:
        """Return the positions of the queries `q_idx` of batch rows `b`."""
        return q_idx + self.offset if self.q_pos is None else look_up(self.q_pos, b, q_idx)

    def key_position(self, b: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the positions of the keys `kv_idx` of batch rows `b`."""
        if self.whole is not None:
            return self.whole.key_position(b, kv_idx)
        return kv_idx if self.kv_pos is None else look_up(self.kv_pos, b, kv_idx)

    def same_segment(self, b: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether query and key belong to the same segment; always true without segments."""
        kv_segment = (self.whole or self).kv_segment
        if self.q_segment is None or kv_segment is None:
            return (q_idx >= 0) & (kv_idx >= 0)
        return self.q_segment[b, q_idx] == kv_segment[b, kv_idx]


def without_keys(table: Tensor, first: int, start: int) -> Tensor:
    """Return a table [..., Tk] without the keys first <= j < start."""
    return torch.cat([table[..., :first], table[..., start:]], -1) if first else table[..., start:]


def look_up(table: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """Return entries of a [T] or [B, T] table."""
    return table[index] if table.dim() == 1 else table[b, index]


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """Return positions [B, T] that count each row's non-padding tokens from 0; padding repeats them."""
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
