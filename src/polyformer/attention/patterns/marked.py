"""Global tokens marked by the caller, for example the tokens of a question."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern, contains
from polyformer.attention.patterns.global_base import GlobalPattern, Side
from polyformer.attention.patterns.implied import Causal
from polyformer.attention.patterns.layout import Keys
from polyformer.core.sequence.context import Context, look_up


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
