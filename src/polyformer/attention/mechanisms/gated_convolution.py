"""A gated short convolution in the place of attention: each token reads the few tokens before it.

    y_t = q_t * sum_o a_o * (k_(t + o) * v_(t + o))        o from 1 - w to 0; * is by channels

a_o [H D] is learned, a number per channel. An encoder's convolution is centred, o from -(w - 1) // 2 to
w // 2. Tokens beyond the text, padding and other documents count as zeros. With a projection of the output it
is a layer of LFM2; its C, B and x are q, k and v here.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.functional.isolation import for_heads, guarded
from polyformer.attention.mechanisms.base import (
    Mechanism,
    MechanismConfig,
    PositionTerms,
    ProjectedHeads,
    check_head_size,
)
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import depthwise_convolution
from polyformer.core.ops.softmax import recording
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedConvolutionConfig(MechanismConfig):
    """A short convolution between two gates, for layers next to layers with softmax.

    Every query head has its own key and value, whatever the other layers of the stack have, and neither
    positions nor `qk_norm` change them. The state is the last w - 1 products of key and value.

    `width`: w, the tokens that an output reads. `bias`: whether the convolution adds one. `backend`: of the
    cross-attention of its layer, which is softmax attention.
    """

    width: PositiveInt = 3
    bias: bool = False
    backend: str = "auto"

    kind: ClassVar[str] = "gated_convolution"
    paper: ClassVar[str] = "Amini et al. 2025 (LFM2)"
    pairs: ClassVar[bool] = False
    supports_score_bias: ClassVar[bool] = False
    reasons: ClassVar[Mapping[str, str]] = {
        "supports_score_bias": "each channel has weights of its own, so single scores do not exist"
    }

    def projected_heads(self, num_heads: int, kv_heads: int, head_size: int) -> ProjectedHeads:
        """Return one key head for each query head."""
        return ProjectedHeads(num_heads, num_heads, num_heads, head_size, head_size, own=True)

    def build(self, num_heads: int, head_size: int) -> "GatedConvolution":
        """Return the module with the taps a, and their bias."""
        return GatedConvolution(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["GatedConvolutionConfig", ...]:
        """Return the default, and an even width with a bias."""
        return cls(), cls(width=4, bias=True)


@dataclasses.dataclass(frozen=True)
class ConvolvedTokens(State):
    """The last products of key and value, [B, M, H D] with M < w, and their documents [B, M], if any.

    The products are at least float32, whatever the precision of the model.
    """

    tokens: Tensor | None = None
    docs: Tensor | None = None


class GatedConvolution(Mechanism):
    """The convolution of k * v, multiplied by q."""

    def __init__(self, config: GatedConvolutionConfig, num_heads: int, head_size: int):
        super().__init__()
        check_head_size(head_size)
        bound = config.width**-0.5
        self.taps = nn.Parameter(torch.empty(config.width, num_heads * head_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(num_heads * head_size)) if config.bias else None

    def new_state(self, reserve: int) -> State:
        """Return the state before the first token; its size does not grow with the number of tokens."""
        return ConvolvedTokens()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """See `Mechanism.forward`."""
        dtype = q.dtype
        # In half precision each product and each tap would round, where dense attention rounds once.
        exact = torch.promote_types(dtype, torch.float32)
        q, k, v = q.to(exact), k.to(exact), v.to(exact)
        y, after = self.convolved(q, k, v, context, state, position)
        if self.bias is not None:
            # Outside of `guarded`: it is of no key, and is no sign of one that is not finite. A query that is
            # not finite has such an output already, and no gradient for the bias.
            added = torch.where(q.isfinite(), q, 0) * self.bias.to(q.dtype).view(q.shape[1], 1, -1)
            valid = context.q_valid
            y = y + (added if valid is None else added.masked_fill(~valid[:, None, :, None].bool(), 0))
        return y.to(dtype), after

    @guarded
    def convolved(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return q times the convolution without its bias, and the next state."""
        assert isinstance(state, ConvolvedTokens | None)
        if recording():
            raise InputError(
                "output_attentions: a gated convolution weights each channel by itself and has no weights of "
                "tokens; leave it out"
            )
        past, heads, queries = state or ConvolvedTokens(), q.shape[1], q.shape[2]
        product = (for_heads(k, heads) * for_heads(v, heads)).transpose(1, 2).flatten(2)  # [B, T, H D]
        length = product.shape[1]
        valid, doc = (None if x is None else x[:, -length:] for x in (context.kv_valid, context.kv_doc))
        taps = self.taps.to(q.dtype)
        y, tokens, docs = depthwise_convolution(
            product, taps, context.causal, valid, doc, past.tokens, past.docs
        )
        y = q * y.unflatten(2, (heads, -1)).transpose(1, 2)[:, :, -queries:]
        if context.q_valid is not None:
            y = y.masked_fill(~context.q_valid[:, None, :, None].bool(), 0)
        return y, None if state is None else ConvolvedTokens(tokens, docs)
