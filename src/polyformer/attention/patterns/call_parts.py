"""Patterns for a part of a call, with their rules evaluated on the slots of the whole call.

    part                                        query i and key j of the part are
    InPart: a run of queries and a run of keys  query i + `query` and key j + `key` of the call
    InResidueClass: slots `apart` slots apart   the slots i * apart + rest and j * apart + rest

A pattern that means the same inside the part stays unchanged.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Documents, Padding
from polyformer.attention.patterns.layout import Keys, Structure, intersect, unite
from polyformer.core.sequence.context import Context


def pattern_in_part(pattern: Pattern, whole: Context, query: int, key: int) -> Pattern:
    """Return `pattern` for a part of the call `whole` that begins at query `query` and key `key`.

    Patterns that depend on distances only, or that read everything from the part's context, stay unchanged.
    All others are evaluated on the queries and keys of `whole`.
    """

    def in_part(part: Pattern) -> Pattern:
        # Documents and padding read tables, and the context of the part has its section of them.
        own = part.structure.by_distance or isinstance(part, (Documents, Padding))
        return part if own else InPart(part, whole, query, key)

    return pattern.map_parts(in_part)


@dataclasses.dataclass(frozen=True)
class InPart(Pattern, named=False):
    """A pattern for a part of a call, evaluated on the slots of the whole call."""

    pattern: Pattern
    whole: Context
    query: int
    key: int

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return pattern(i + query, j + key), evaluated in the whole call."""
        # Indices of the part become indices of the whole call.
        return self.pattern.allows(self.whole, b, h, q_idx + self.query, kv_idx + self.key)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys of the pattern in the whole call, clipped to the part."""
        keys = self.pattern.keys(self.whole, start + self.query, stop + self.query)
        # Back to indices of the part; keys outside of it belong to other parts.
        some, full = (
            intersect(((a - self.key, b - self.key) for a, b in runs), ((0, context.kv_len),))
            for runs in (keys.some, keys.full)
        )
        return Keys(some, full)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the cuts of the pattern in the whole call, moved to the queries of the part."""
        return tuple(cut - self.query for cut in self.pattern.cuts(self.whole))

    @property
    def structure(self) -> Structure:
        """That of the pattern: distances are the same in a part, while the rule reads the whole call."""
        return dataclasses.replace(self.pattern.structure, by_distance=False)

    def is_static(self) -> bool:
        """Return False: the context `whole` belongs to a single call."""
        return False

    def with_tables(self, context: Context, device: torch.device) -> Pattern:
        """Return the pattern with its tables of the whole call."""
        return dataclasses.replace(self, pattern=self.pattern.with_tables(self.whole, device))

    def head_pattern(self, head: int) -> Pattern:
        """Return the pattern of this head, for the same part."""
        return pattern_in_part(self.pattern.head_pattern(head), self.whole, self.query, self.key)


def pattern_in_residue_class(pattern: Pattern, context: Context, stride: int) -> Pattern:
    """Return `pattern` among the tokens of one residue class, `stride` slots of `context` apart."""
    return pattern.map_parts(
        lambda part: part.in_residue_class(stride) or InResidueClass(part, context, stride)
    )


def residue_class_context(context: Context, stride: int) -> Context:
    """Return the context of the tokens of each class.

    It contains only documents, validity and causality; patterns that need more use the original context.
    """
    # `front` slots before the first query complete its group of `stride` slots.
    first, front = divmod(context.offset, stride)
    queries, keys = -(-(front + context.q_len) // stride), -(-context.kv_len // stride)
    tables = {}
    for name, table, start, length in (
        ("kv_valid", context.kv_valid, 0, keys),
        ("kv_doc", context.kv_doc, 0, keys),
        ("q_doc", context.q_doc, front, queries),
    ):
        if table is not None:
            tables[name] = residue_class_table(table, start, length * stride, stride, edge=name != "kv_valid")
    return Context(queries, keys, causal=context.causal, q_start=first, **tables)


@dataclasses.dataclass(frozen=True)
class InResidueClass(Pattern, named=False):
    """A pattern among the tokens of a class, evaluated on their slots in the call."""

    pattern: Pattern
    context: Context
    apart: int  # the slots from one token of a class to the next

    def is_static(self) -> bool:
        """Return False: `context` belongs to a single call."""
        return False

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return pattern(slot of i, slot of j) in the context of the call."""
        place = original_indices(self.context, self.apart, context, b, q_idx, kv_idx)
        return self.pattern.allows(self.context, place[0], h, *place[1:])

    def with_tables(self, context: Context, device: torch.device) -> Pattern:
        """Return the pattern with its tables of the call."""
        return dataclasses.replace(self, pattern=self.pattern.with_tables(self.context, device))

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys of the slots from the first query to the last, divided by the step."""
        step, offset = self.apart, self.context.offset
        # Neighbours in a class are `step` slots apart in the call.
        first = max((start + context.offset) * step - offset, 0)
        last = min((stop + context.offset) * step - offset, self.context.q_len)
        if first >= last:
            return Keys(())
        keys = self.pattern.keys(self.context, first, last)
        return Keys(
            # Rounded outwards for keys to visit, and inwards for keys without a mask.
            unite((a // step, (b - 1) // step + 1) for a, b in keys.some),
            unite((-(-a // step), b // step) for a, b in keys.full),
        )


def original_indices(
    context: Context, stride: int, inner: Context, b: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the batch row, query and key of `context` for indices in the classes' context `inner`.

    Tokens added to fill the classes map to some token of the call: no query sees them, and their outputs are
    not used.
    """
    # Row b of the classes is class b % stride of batch row b // stride.
    row = torch.div(b, stride, rounding_mode="floor")
    rest = b - row * stride
    query = (q_idx + inner.offset) * stride + rest - context.offset
    return row, query.clamp(0, context.q_len - 1), (kv_idx * stride + rest).clamp_max(context.kv_len - 1)


def residue_class_table(x: Tensor, front: int, length: int, stride: int, edge: bool) -> Tensor:
    """Return x [B, T] as [B * stride, length / stride], filled with False, or by the `edge`."""
    after = length - front - x.shape[1]
    padding_before, padding_after = x[:, :1].expand(-1, front), x[:, -1:].expand(-1, after)
    if not edge:
        padding_before, padding_after = torch.zeros_like(padding_before), torch.zeros_like(padding_after)
    padded = torch.cat([padding_before, x, padding_after], 1)
    # [B, T] -> [B, T / stride, stride] -> [B, stride, T / stride] -> [B * stride, T / stride]
    return padded.unflatten(1, (-1, stride)).mT.flatten(0, 1)
