"""A transition that sees the neighbours of each token: two separable convolutions around an activation.

    h = act((D_1 * x) W_1 + b_1)        y = (D_2 * h) W_2 + b_2
    (D * x)_t = sum over o of D_o x_(t + o)        D_o [E]: a number for each channel

o goes from 1 - w to 0 in a decoder, and from -(w - 1) // 2 to w // 2 in an encoder, w the width. Tokens
beyond the text, padding and other documents count as zeros, before each of the two. In decoding the state is
the last w_1 - 1 vectors x and w_2 - 1 vectors h; tokens cannot be taken back from it. A memory of earlier
segments has it too, in training as in evaluation; a layer that training skipped begins the next segment from
zeros.

Costs w_1 E + w_2 F products a token more than the dense feed-forward, F the intermediate size. Dehghani et
al. 2019 (Universal Transformers), section 2.1; widths 3 and 5, the activation between the two, one bias each
and zeros for padding are those of the authors' code (tensor2tensor, `sepconv_relu_sepconv`).
"""

import dataclasses
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.feedforward.base import FeedForward, SizedConfig
from polyformer.ops.dropout import Dropout
from polyformer.ops.linear import Linear, activated
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeparableConvolutionConfig(SizedConfig):
    """`widths`: how many tokens the first and the second convolution see."""

    widths: tuple[int, int] = (3, 5)

    kind: ClassVar[str] = "separable_convolution"
    paper: ClassVar[str] = "Dehghani et al. 2019 (Universal Transformer), section 2.1"
    tokenwise: ClassVar[bool] = False
    stateful: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.widths) < 1:
            raise InputError(f"widths: count tokens, expected 1 or more, got {list(self.widths)}")

    def build(self, hidden_size: int) -> "SeparableConvolution":
        """Two separable convolutions, E -> F -> E."""
        return SeparableConvolution(hidden_size, self)

    @classmethod
    def examples(cls) -> tuple["SeparableConvolutionConfig", ...]:
        """The authors', and one of even widths."""
        return cls(), cls(widths=(2, 4))


@dataclasses.dataclass(frozen=True)
class Recent(State):
    """The last tokens of a text, those that there are.

    x: [B, M, E], with zeros for padding. x_doc: [B, M], their documents; None for one. h: [B, N, F], and
    h_doc, likewise.
    """

    x: Tensor | None = None
    x_doc: Tensor | None = None
    h: Tensor | None = None
    h_doc: Tensor | None = None


class SeparableConvolution(FeedForward):
    """x [B, T, E] -> [B, T, E]."""

    def __init__(self, hidden_size: int, config: SeparableConvolutionConfig):
        super().__init__()
        self.activation = config.activation
        self.dropout = Dropout(config.inner_dropout)
        first, second = config.widths
        inner = config.intermediate_size
        self.around = nn.Parameter(torch.empty(first, hidden_size))
        self.up = Linear(hidden_size, inner, bias=config.bias)
        self.around_inner = nn.Parameter(torch.empty(second, inner))
        self.down = Linear(inner, hidden_size, bias=config.bias)
        for taps in (self.around, self.around_inner):
            nn.init.uniform_(taps, -1 / math.sqrt(len(taps)), 1 / math.sqrt(len(taps)))

    def new_state(self) -> Recent:
        """Of no token."""
        return Recent()

    def forward(
        self, x: Tensor, context: Context | None = None, state: Recent | None = None
    ) -> Tensor | tuple[Tensor, Recent]:
        """y, and the next state after a `state`, which a causal `context` has alone."""
        past = state or Recent()
        y, x, x_doc = convolved(x, self.around, context, past.x, past.x_doc)
        h = self.dropout(activated(y, self.up, self.activation))
        y, h, h_doc = convolved(h, self.around_inner, context, past.h, past.h_doc)
        y = self.down(y)
        return y if state is None else (y, Recent(x, x_doc, h, h_doc))


def convolved(
    x: Tensor,
    taps: Tensor,
    context: Context | None,
    past: Tensor | None = None,
    past_doc: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """D * x [B, T, E] with D the `taps` [w, E], and the last w - 1 tokens with their documents.

    past: those before x, of which there are fewer at the beginning. Without a context all tokens are of one
    text, which an encoder reads.
    """
    width, length, doc = len(taps), x.shape[1], None
    causal = context is not None and context.causal
    if context is not None:
        doc = context.q_doc
        if context.kv_valid is not None:
            valid = context.kv_valid[:, context.offset : context.offset + length]
            x = x.masked_fill(~valid.bool().unsqueeze(-1), 0)
    if doc is not None:
        doc = doc.expand(len(x), -1)
    before = 0 if past is None else past.shape[1]
    if past is not None:
        if doc is not None:  # the past of a text without numbers is document 0
            doc = torch.cat([doc.new_zeros(len(x), before) if past_doc is None else past_doc, doc], 1)
        x = torch.cat([past.to(x.dtype), x], 1)
    left = width - 1 if causal else (width - 1) // 2
    padded = F.pad(x, (0, 0, left - before, width - 1 - left))
    y = torch.zeros_like(x[:, before:])
    for tap in range(width):
        seen = padded[:, tap : tap + length]
        if doc is not None:
            numbers = F.pad(doc, (left - before, width - 1 - left))  # beyond the text there are zeros anyway
            same = numbers[:, tap : tap + length] == doc[:, before:]
            seen = seen.masked_fill(~same.unsqueeze(-1), 0)
        y = y + taps[tap] * seen
    kept = slice(max(0, x.shape[1] - width + 1), None)
    return y, x[:, kept], None if doc is None else doc[:, kept]
