"""Global tokens: a few tokens see everything and are seen by everything.

    pattern              query i sees key j if
    Global(tokens)       i or j is among the first `tokens` positions of its document
    GlobalEnd(tokens)    i or j is among the last `tokens` positions of its document
    Marked()             the caller has marked i or j, for example as a token of a question
    Whole(tokens)        their document has at most `tokens` tokens
    Prefix(tokens)       j <= i, or j is among the first `tokens` positions of its document

Positions are counted in documents, so padding and packing do not change the result. The end of a document is
unknown until it is complete, so a decoder cannot use `GlobalEnd` and `Whole`.

`GlobalEnd` completes the global tokens of BigBird's ITC form, where the first and last blocks are global.

With a sparse pattern, `Whole(704) | BlockWindow(64) | ..`, this is the behaviour of transformers' BigBird for
short texts, where sparse blocks save nothing: at most `tokens` keys per query, and none in long documents.

`Prefix` is for stacks that are not causal: a prefix language model reads a given text in both directions and
writes its continuation. A decoder hides later tokens of the prefix too, and refuses it. Cost: as causal
attention, and at most tokens^2 / 2 more pairs.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern, contains
from polyformer.attention.patterns.block_base import last_positions, side_positions
from polyformer.attention.patterns.global_base import DocumentEndPattern, FirstPositions, GlobalPattern, Side
from polyformer.attention.patterns.implied import Causal
from polyformer.attention.patterns.layout import BlockNeeds, Interval, Keys, Structure, clip
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context, look_up
from polyformer.core.sequence.tokens import Reach


@dataclasses.dataclass(frozen=True)
class Global(FirstPositions):
    """Global tokens: the first `tokens` of each document see all keys and are seen by all queries.

    Tokens are counted in positions, so left padding and packed documents do not change them.
    """

    tokens: PositiveInt = 1

    paper: ClassVar[str] = "Beltagy et al. 2020 (Longformer), section 3.1"

    @property
    def structure(self) -> Structure:
        """The first `tokens` positions: no later token is global."""
        return Structure(reach=Reach(0, first=self.tokens), blocks=BlockNeeds(first=self.tokens))


MAX_CUTS = 64
"""The most cuts of a layout; more cuts cost more than they save."""


@dataclasses.dataclass(frozen=True)
class GlobalEnd(DocumentEndPattern):
    """Global tokens at the end: the last `tokens` of each document see all keys and are seen by all queries.

    Padding does not count. Raises `InputError` for tokens below 1, and in a causal context.
    """

    tokens: PositiveInt = 1

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), section 2 (ITC)"
    causal_error: ClassVar[str] = (
        "a causal query cannot know where its document ends; use it in an encoder, "
        "or Global for the first tokens"
    )

    @property
    def structure(self) -> Structure:
        """The last tokens."""
        return Structure(blocks=BlockNeeds(last=self.tokens))

    def global_slots(self, context: Context, start: int, length: int) -> tuple[Interval, ...]:
        """Return the slots of the last `tokens` tokens."""
        return clip(context.kv_len - self.tokens - start, length, length)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the cuts of global tokens, unless there are more than `MAX_CUTS`."""
        cuts = super().cuts(context)
        # the document boundaries of many short documents already make the rows short
        return cuts if len(cuts) <= MAX_CUTS else ()

    def table(self, context: Context, side: Side) -> Tensor:
        """Return whether position > last position of the document - tokens."""
        ends = last_positions(context)
        positions, length, shift = side_positions(context, side)
        slots = torch.arange(length) + shift
        # Queries are some of the key slots: take the ends of their documents.
        if side == "q":
            ends = ends[:, slots.clamp(0, context.kv_len - 1)]
        return (slots if positions is None else positions) > ends - self.tokens


@dataclasses.dataclass(frozen=True)
class Marked(GlobalPattern):
    """Marked global tokens: tokens that the caller marks see all keys and are seen by all queries.

    A model takes the marks as `global_attention_mask` [B, T], 1 where a token is global; they may differ
    from row to row. `attend` reads them from `Context(q_marked=..., kv_marked=...)`.
    """

    paper: ClassVar[str] = "Beltagy et al. 2020 (Longformer), section 3.1"

    def is_global(self, context: Context, side: Side, b: Tensor, index: Tensor) -> Tensor:
        """Return the mark of the caller; without marks no token is global."""
        marks = context.q_marked if side == "q" else context.kv_marked
        # `index < 0` is False for all tokens, in the shape of `index`.
        return index < 0 if marks is None else look_up(marks, b, index)

    def static_slots(self, context: Context, side: Side) -> Keys | None:
        """Return no slots if the context has no marks, else None."""
        marks = context.q_marked if side == "q" else context.kv_marked
        return Keys(()) if marks is None else None

    @classmethod
    def examples(cls) -> tuple[Pattern, ...]:
        """Return a union with `Causal`: without marks this pattern allows nothing."""
        return (Causal() | cls(),)

    @classmethod
    def picture(cls) -> tuple[Pattern, Context]:
        """Return four marked tokens."""
        marks = torch.isin(torch.arange(48), torch.tensor([5, 20, 21, 40])).view(1, -1)
        return cls(), Context(48, 48, q_marked=marks, kv_marked=marks)


def reads_marks(part: object) -> bool:
    """Return whether `part`, a pattern or a configuration, contains `Marked`."""
    return contains(part, Marked)


@dataclasses.dataclass(frozen=True)
class Whole(DocumentEndPattern):
    """Short documents whole: tokens of documents of at most `tokens` tokens see their whole document.

    Padding does not count. Raises `InputError` for tokens below 1, and in a causal context.
    """

    tokens: PositiveInt

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), section 2"
    causal_error: ClassVar[str] = (
        "a causal query cannot know how long its document will be; use it in an encoder"
    )

    @property
    def structure(self) -> Structure:
        """The whole text if it is short."""
        return Structure(blocks=BlockNeeds(whole=self.tokens))

    def global_slots(self, context: Context, start: int, length: int) -> tuple[Interval, ...]:
        """Return all slots or none."""
        return ((0, length),) if context.kv_len <= self.tokens and length else ()

    def table(self, context: Context, side: Side) -> Tensor:
        """Return whether the document has at most `tokens` tokens."""
        # The last position of a document is its number of tokens minus 1.
        short = last_positions(context) < self.tokens
        if side == "kv":
            return short
        _, length, shift = side_positions(context, side)
        return short[:, (torch.arange(length) + shift).clamp(0, context.kv_len - 1)]

    @classmethod
    def examples(cls) -> tuple[Pattern, ...]:
        """Return small instances; the second is a union, as `Whole` allows nothing in long documents."""
        return cls(100), Causal() | cls(5)

    @classmethod
    def picture(cls) -> tuple[Pattern, Context]:
        """Return four documents, two of them short."""
        documents = torch.tensor([[0] * 9 + [1] * 21 + [2] * 12 + [3] * 6])
        return cls(12), Context(48, 48, q_doc=documents, kv_doc=documents)


@dataclasses.dataclass(frozen=True)
class Prefix(Pattern):
    """Prefix pattern: every query sees the first `tokens` positions of its document, and its past."""

    tokens: PositiveInt

    paper: ClassVar[str] = "Raffel et al. 2020 (T5), section 3.2.1"

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether j <= i or position j < tokens."""
        return (context.distance(q_idx, kv_idx) >= 0) | (context.key_position(b, kv_idx) < self.tokens)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the past of the queries, and the slots of the prefix."""
        prefix = FirstPositions(self.tokens).runs(context, "kv")
        if prefix is None:
            return super().keys(context, start, stop)
        # The slots of the first and the last query of the row.
        first, last = start + context.offset, stop - 1 + context.offset
        length = context.kv_len
        return Keys(clip(0, last + 1, length), clip(0, first + 1, length)) | prefix

    def causal(self) -> bool:
        """Return False: a token of the prefix sees later tokens."""
        return False

    @classmethod
    def examples(cls) -> tuple["Prefix", ...]:
        return (cls(5),)

    @classmethod
    def picture(cls) -> tuple["Prefix", Context]:
        """Return a prefix of a third of the tokens."""
        return cls(16), Context(48, 48)
