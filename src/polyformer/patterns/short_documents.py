"""Short documents whole: where a document has few tokens, all of them see one another.

Beside a sparse pattern, `Whole(704) | BlockWindow(64) | ..`, it is what transformers' BigBird does with short
texts, for which sparse blocks save nothing. Each document is judged by its own tokens, so padding and packing
change nothing. How long a document will be is known only once it is all there, so no decoder has this.
Cost: at most `tokens` keys a query, and none in long documents.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.patterns.base import Pattern
from polyformer.patterns.block_base import check_size, last_positions, side_of
from polyformer.patterns.global_base import GlobalPattern, Side
from polyformer.patterns.implied import Causal
from polyformer.patterns.layout import Keys
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Whole(GlobalPattern):
    """The tokens of documents of at most `tokens` tokens see all keys of their document.

    Padding does not count. Raises `InputError` for tokens below 1, and in a causal context.
    """

    tokens: int

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), section 2"

    def __post_init__(self) -> None:
        check_size("Whole", tokens=self.tokens)

    def causal(self) -> bool:
        """No: the length of a document is not known before it is there."""
        return False

    def chosen(self, context: Context, side: Side, b: Tensor, index: Tensor) -> Tensor:
        """The document has at most `tokens` tokens."""
        table = context.once((self, side, "table"), lambda: self._table(context, side)).to(index.device)
        return table[0, index] if len(table) == 1 else table[b, index]

    def known(self, context: Context, side: Side) -> Keys | None:
        """All slots or none, where the context has no documents, padding or positions."""
        self._check(context)
        if any(
            tensor is not None for tensor in (context.q_pos, context.kv_pos, context.kv_doc, context.kv_valid)
        ):
            return None
        length = context.q_len if side == "q" else context.kv_len
        everything = ((0, length),) if context.kv_len <= self.tokens and length else ()
        return Keys(everything, everything)

    def _table(self, context: Context, side: Side) -> Tensor:
        """Which queries or keys are of a short document, [B or 1, T]."""
        self._check(context)
        short = last_positions(context) < self.tokens
        if side == "kv":
            return short
        _, length, shift = side_of(context, side)
        return short[:, (torch.arange(length) + shift).clamp(0, context.kv_len - 1)]

    def _check(self, context: Context) -> None:
        if context.causal:
            raise InputError(
                "Whole: a causal query cannot know how long its document will be; use it in an encoder"
            )

    @classmethod
    def examples(cls) -> tuple[Pattern, ...]:
        """The second beside another: alone it allows nothing in long documents."""
        return cls(100), Causal() | cls(5)

    @classmethod
    def picture(cls) -> tuple[Pattern, Context]:
        """Four documents, of which two are short."""
        documents = torch.tensor([[0] * 9 + [1] * 21 + [2] * 12 + [3] * 6])
        return cls(12), Context(48, 48, q_doc=documents, kv_doc=documents)
