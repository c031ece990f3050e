"""A feed-forward that reads the neighbours of each token: two separable convolutions around an activation.

    h = act((D_1 * x) W_1 + b_1)        y = (D_2 * h) W_2 + b_2
    (D * x)_t = sum over o of D_o x_(t + o)        D_o [E]: a number for each channel

o ranges from 1 - w to 0 in a decoder, and from -(w - 1) // 2 to w // 2 in an encoder, where w is the width.
Tokens beyond the text, padding and other documents are zeros in both convolutions. In decoding the state
consists of the last w_1 - 1 vectors x and w_2 - 1 vectors h; tokens cannot be removed from it. A memory of
earlier segments contains the state too, in training and in evaluation. A layer that was skipped in training
starts the next segment from zeros.

The cost is w_1 E + w_2 F products per token more than the dense feed-forward, F the intermediate size.
Dehghani et al. 2019 (Universal Transformers), section 2.1. The widths 3 and 5, the activation between the
convolutions, a bias in each convolution and zeros for padding follow the authors' code (tensor2tensor,
`sepconv_relu_sepconv`).
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.ops.depthwise_convolution import depthwise_convolution
from polyformer.core.ops.dropout import Dropout
from polyformer.core.ops.linear import Linear, activated
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State
from polyformer.nn.feedforward.base import FeedForward, SizedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeparableConvolutionConfig(SizedConfig):
    """Convolutional feed-forward: two separable convolutions with an activation between them.

    `widths`: the number of tokens that the first and the second convolution read.
    """

    widths: tuple[PositiveInt, PositiveInt] = (3, 5)

    kind: ClassVar[str] = "separable_convolution"
    paper: ClassVar[str] = "Dehghani et al. 2019 (Universal Transformer), section 2.1"
    tokenwise: ClassVar[bool] = False
    stateful: ClassVar[bool] = True

    def build(self, hidden_size: int) -> "SeparableConvolution":
        return SeparableConvolution(hidden_size, self)

    @classmethod
    def examples(cls) -> tuple["SeparableConvolutionConfig", ...]:
        return cls(), cls(widths=(2, 4))


@dataclasses.dataclass(frozen=True)
class ConvolutionState(State):
    """The last tokens of a text, fewer at its start.

    x: [B, M, E], with zeros for padding. x_doc: [B, M], their documents; None for a single document.
    h: [B, N, F], and h_doc: [B, N], likewise.
    """

    x: Tensor | None = None
    x_doc: Tensor | None = None
    h: Tensor | None = None
    h_doc: Tensor | None = None


class SeparableConvolution(FeedForward):
    """A module that maps x [B, T, E] to [B, T, E] with two separable convolutions."""

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

    def new_state(self) -> ConvolutionState:
        return ConvolutionState()

    def forward(
        self, x: Tensor, context: Context | None = None, state: ConvolutionState | None = None
    ) -> Tensor | tuple[Tensor, ConvolutionState]:
        """Return y, and with a `state` also the next state; only a causal `context` has a state."""
        past = state or ConvolutionState()
        # Without a context all tokens belong to a single text of an encoder.
        limits = (False, None, None) if context is None else (context.causal, context.q_valid, context.q_doc)
        y, x, x_doc = depthwise_convolution(x, self.around, *limits, past.x, past.x_doc)
        h = self.dropout(activated(y, self.up, self.activation))
        y, h, h_doc = depthwise_convolution(h, self.around_inner, *limits, past.h, past.h_doc)
        y = self.down(y)
        return y if state is None else (y, ConvolutionState(x, x_doc, h, h_doc))
