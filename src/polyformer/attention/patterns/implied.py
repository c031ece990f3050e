"""The patterns that a `Context` implies: full attention, causality, documents and padding."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.layout import Interval, Keys, Structure, clip
from polyformer.core.host_values import on_host
from polyformer.core.sequence.context import Context


class ImpliedPattern(Pattern, named=False):
    """Base of these patterns: in a residue class they are the same, over the tables of the class."""

    @property
    def structure(self) -> Structure:
        """No limit of the distance; the rule depends on the distance only, if it reads no tables."""
        return Structure(by_distance=isinstance(self, Full | Causal))

    def in_residue_class(self, stride: int) -> Pattern:
        """Return `self`: the order of slots is the order inside a class."""
        return self


@dataclasses.dataclass(frozen=True)
class Full(ImpliedPattern):
    """Full attention: every query sees every key."""

    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.2"

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return True."""
        # True, in the shape to which both indices broadcast.
        return (q_idx >= 0) & (kv_idx >= 0)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return all keys, without a mask."""
        everything = clip(0, context.kv_len, context.kv_len)
        return Keys(everything, everything)


@dataclasses.dataclass(frozen=True)
class Causal(ImpliedPattern):
    """Causal mask: a query sees its own position and earlier ones."""

    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.2.3"

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether j <= i."""
        return context.distance(q_idx, kv_idx) >= 0

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys 0 .. i."""
        first, last = start + context.offset, stop - 1 + context.offset
        # The last query sees the most keys; keys up to the first query need no mask.
        return Keys(clip(0, last + 1, context.kv_len), clip(0, first + 1, context.kv_len))


@dataclasses.dataclass(frozen=True)
class Padding(ImpliedPattern):
    """Padding mask: queries see only non-padding keys.

    `context.kv_valid` marks these keys; without it no key is padding.
    """

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return kv_valid[j]."""
        if context.kv_valid is None:
            return Full().allows(context, b, h, q_idx, kv_idx)
        return context.kv_valid[b, kv_idx]

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the runs of slots that are not padding in some, and in all, batch rows."""
        if context.kv_valid is None:
            return Full().keys(context, start, stop)
        if torch.compiler.is_compiling():  # a tensor cannot be read while a graph is traced
            return super().keys(context, start, stop)
        mask = context.kv_valid

        def shared() -> Keys:
            """Return the slots that are not padding in some, and in all, batch rows."""
            valid = on_host(mask)
            return Keys(runs(valid.any(0)), runs(valid.all(0)))

        return context.once(self, shared)

    @classmethod
    def picture(cls) -> tuple[Pattern, Context]:
        """Return a batch row with padding at its end."""
        return cls(), Context(48, 48, kv_valid=torch.arange(48).view(1, -1) < 37)


@dataclasses.dataclass(frozen=True)
class Documents(ImpliedPattern):
    """Document mask: a query sees only the keys of its document.

    Tokens of the same document have equal numbers in `context.q_doc` and `context.kv_doc`.
    """

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether q_doc[i] == kv_doc[j]."""
        if context.q_doc is None or context.kv_doc is None:
            return Full().allows(context, b, h, q_idx, kv_idx)
        return context.q_doc[b, q_idx] == context.kv_doc[b, kv_idx]

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys from the first to the last key of the queries' documents."""
        if context.q_doc is None or context.kv_doc is None:
            return Full().keys(context, start, stop)
        if torch.compiler.is_compiling():
            return super().keys(context, start, stop)
        spans = context.once(self, lambda: _document_spans(context.q_doc, context.kv_doc))
        first, last = (edges[:, start:stop] for edges in spans)
        return Keys.of_spans(first, last, context.kv_len)

    @classmethod
    def picture(cls) -> tuple[Pattern, Context]:
        """Return three documents in one batch row."""
        numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([19, 10, 19])).view(1, -1)
        return cls(), Context(48, 48, q_doc=numbers, kv_doc=numbers)


CAUSAL, DOCUMENTS, PADDING = Causal(), Documents(), Padding()


def implied(context: Context) -> Pattern | None:
    """Return the restrictions of the context as a pattern; None if there are none."""
    combined: Pattern | None = CAUSAL if context.causal else None
    for table, pattern in ((context.q_doc, DOCUMENTS), (context.kv_valid, PADDING)):
        if table is not None:
            combined = pattern if combined is None else combined & pattern
    return combined


def restricted(pattern: Pattern, context: Context) -> Pattern:
    """Return the pattern with the restrictions of the context."""
    limits = implied(context)
    return pattern if limits is None else pattern & limits


def runs(flags: Tensor) -> tuple[Interval, ...]:
    """Return the runs of True in a [T] bool tensor, as intervals."""
    # 1 where a run starts, -1 just after its end.
    edges = torch.diff(flags.int(), prepend=flags.new_zeros(1).int(), append=flags.new_zeros(1).int())
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return tuple(zip(starts, stops))


def _document_spans(q_doc: Tensor | None, kv_doc: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the first key slot and the last plus 1 of every query's document, [B, Tq] each.

    Document numbers are sorted in each row.
    """
    assert q_doc is not None, "Documents asks only where the context has them"
    assert kv_doc is not None
    kv_doc, q_doc = on_host(kv_doc).contiguous(), on_host(q_doc).contiguous()
    # Equal numbers are neighbours: bisection from the left and from the right.
    return torch.searchsorted(kv_doc, q_doc), torch.searchsorted(kv_doc, q_doc, right=True)
