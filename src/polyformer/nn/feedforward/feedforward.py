"""Feed-forwards: what a layer computes of each token x [E] besides attention, with F inner channels.

    dense                   act(x W_in + b_in) W_out + b_out
    gated                   (act(x W_gate) * x W_in) W_out
                            (act(min(x W_gate, L)) * (clamp(x W_in, -L, L) + o)) W_out, with clamp and offset
                            s_2 (act(s_1 x W_gate) * x W_in) W_out, with scales
    none                    0
    alternate               f_l(x), in layer l
    chunked                 concat(f(x_1), f(x_2), ..), x_i: `chunk` tokens each
    separable_convolution   h = act((D_1 * x) W_1 + b_1)        y = (D_2 * h) W_2 + b_2
                            (D * x)_t = sum over o of D_o x_(t + o)        D_o [E]: a number for each channel

All but the last process each token separately. `experts` has feed-forwards of which each token uses a few.
"""

import dataclasses
import math
from functools import partial
from typing import ClassVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.layers import ActivationName, Dropout, activation, depthwise_convolution
from polyformer.core.ops.linear import Linear, WideLinear, activated
from polyformer.core.parts import submodule
from polyformer.core.ranges import FiniteFloat, PositiveFloat, PositiveInt, Probability
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(Config):
    """Family of feed-forwards: `build(hidden_size)` creates the module.

    `tokenwise`: the output of a token depends only on this token. `stateful`: decoding uses a state of
    earlier tokens. `exchanges`: the module communicates with other processes if a sequence is spread over
    them.
    """

    option: ClassVar[str] = "model.feedforward"
    tokenwise: ClassVar[bool] = True
    stateful: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False

    def build(self, hidden_size: int) -> "FeedForward":
        """Return the module for a model of width `hidden_size`."""
        raise NotImplementedError

    def for_layer(self, layer: int) -> "FeedForwardConfig":
        """Return the configuration of layer `layer` of a stack; by default all layers have the same."""
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizedConfig(FeedForwardConfig):
    """Base of the feed-forwards with an inner layer of `intermediate_size` channels."""

    intermediate_size: PositiveInt = 2048
    activation: ActivationName = "relu"
    bias: bool = True
    inner_dropout: Probability = 0.0  # of the inner layer, after the activation


class FeedForward(nn.Module):
    """A module that maps x [..., E] to [..., E]."""

    def widen(self) -> None:
        """Return float32 for x in float16 from now on, if the member can: outputs exceed float16's range."""

    def new_state(self) -> State | None:
        """Return the state before the first token; None for a member without a state."""
        return None

    def forward(
        self, x: Tensor, context: Context | None = None, state: State | None = None
    ) -> Tensor | tuple[Tensor, State]:
        """Return the output for x [B, T, E], and with a `state` (of a stateful member) also the next state.

        `context`: describes the tokens of x, which are its queries; it marks padding and documents.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(SizedConfig):
    """Dense feed-forward: two linear layers with an activation between them.

    The cost is 2 E F products per token.
    """

    kind: ClassVar[str] = "dense"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.3"

    def build(self, hidden_size: int) -> "Dense":
        return Dense(hidden_size, self)


class Dense(FeedForward):
    """Two linear layers around an activation: x [..., E] -> [..., E]."""

    up: Linear = submodule()
    down: Linear = submodule()
    dropout: Dropout = submodule()

    def __init__(self, hidden_size: int, config: DenseConfig):
        super().__init__()
        self.activation = config.activation
        self.dropout = Dropout(config.inner_dropout)
        self.up = Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.down = Linear(config.intermediate_size, hidden_size, bias=config.bias)

    def widen(self) -> None:
        self.down.__class__ = WideLinear

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return act(x W_in + b_in) W_out + b_out."""
        inner = activated(x, self.up, self.activation)
        return self.down(self.dropout(inner) if self.training else inner)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedConfig(SizedConfig):
    """Gated feed-forward: an activated projection multiplies a linear projection, as in GLU and SwiGLU.

    The cost is 3 E F products per token.

    `activation`: "sigmoid" for GLU, "gelu" for GEGLU, "silu" for SwiGLU. The clamped SwiGLU of gpt-oss has
    "quick_gelu", `clamp` 7, `up_offset` 1 and biases. Falcon-H1 has `scales`, factors of the projection
    before the activation and of the output.
    """

    activation: ActivationName = "silu"
    bias: bool = False
    clamp: PositiveFloat | None = None  # of the linear projection, and above only of the activated one
    up_offset: FiniteFloat = 0.0  # added to the linear projection
    scales: tuple[PositiveFloat, PositiveFloat] | None = None

    kind: ClassVar[str] = "gated"
    paper: ClassVar[str] = "Shazeer 2020, equations 5 and 6"

    def __post_init__(self) -> None:
        if self.scales is not None and (self.clamp is not None or self.up_offset):
            raise InputError(
                f"scales: expected null with clamp {self.clamp} and up_offset {self.up_offset}, got "
                f"{self.scales}; unset either"
            )

    def build(self, hidden_size: int) -> "Gated":
        return Gated(hidden_size, self) if self.scales is None else ScaledGated(hidden_size, self)

    @classmethod
    def examples(cls) -> tuple["GatedConfig", ...]:
        return cls(), cls(scales=(0.5, 1.5))


class Gated(FeedForward):
    """A module that maps x [..., E] to [..., E] with a gate on the inner layer."""

    gate: Linear = submodule()
    up: Linear = submodule()
    down: Linear = submodule()
    dropout: Dropout = submodule()

    def __init__(self, hidden_size: int, config: GatedConfig):
        super().__init__()
        self.activation, self.clamp, self.up_offset = config.activation, config.clamp, config.up_offset
        self.dropout = Dropout(config.inner_dropout)
        self.gate = Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.up = Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.down = Linear(config.intermediate_size, hidden_size, bias=config.bias)

    def widen(self) -> None:
        self.down.__class__ = WideLinear

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return (act(x W_gate) * x W_in) W_out, with projections within the clamp."""
        if self.clamp is None:
            gate, up = activated(x, self.gate, self.activation), self.up(x)
        else:
            gate = activation(self.activation)(self.gate(x).clamp(max=self.clamp))
            up = self.up(x).clamp(-self.clamp, self.clamp)
        return self.down(self.dropout(gate * (up + self.up_offset if self.up_offset else up)))


class ScaledGated(Gated):
    """A gated feed-forward with factors of the projection before the activation, and of the output."""

    def __init__(self, hidden_size: int, config: GatedConfig):
        super().__init__(hidden_size, config)
        assert config.scales is not None
        self.gate_scale, self.output_scale = config.scales

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return s_2 (act(s_1 x W_gate) * x W_in) W_out."""
        gate = activation(self.activation)(self.gate(x) * self.gate_scale)
        return self.down(self.dropout(gate * self.up(x))) * self.output_scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoFeedForwardConfig(FeedForwardConfig):
    """No feed-forward: layers have only attention, and no norm for a feed-forward, as in Mamba-2."""

    kind: ClassVar[str] = "none"
    paper: ClassVar[str] = "Dao and Gu 2024 (Mamba-2), section 7.1"

    def build(self, hidden_size: int) -> "NoFeedForward":
        return NoFeedForward()


class NoFeedForward(FeedForward):
    """The module of a layer without a feed-forward, which does not call it."""

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return zeros: nothing is added to the residual stream."""
        return x.new_zeros(x.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlternateFeedForwardConfig(FeedForwardConfig):
    """Alternating feed-forwards: each layer has the next feed-forward of a list, which repeats.

    An example is experts in every second layer.

    `feedforwards`: the feed-forwards of the layers in turn.
    """

    feedforwards: tuple[FeedForwardConfig, ...]

    kind: ClassVar[str] = "alternate"
    paper: ClassVar[str] = "Lepikhin et al. 2021 (GShard), section 2.1"

    def __post_init__(self) -> None:
        if not self.feedforwards:
            raise InputError("feedforwards: expected 1 feed-forward or more, got none")
        if not all(feedforward.tokenwise for feedforward in self.feedforwards):
            object.__setattr__(self, "tokenwise", False)

    def for_layer(self, layer: int) -> FeedForwardConfig:
        """Return the feed-forward with the index `layer` modulo their number."""
        return self.feedforwards[layer % len(self.feedforwards)].for_layer(layer)

    def build(self, hidden_size: int) -> FeedForward:
        """Return the module of the first layer: outside a stack there is only this layer."""
        return self.for_layer(0).build(hidden_size)

    @classmethod
    def examples(cls) -> tuple["AlternateFeedForwardConfig", ...]:
        return (cls(feedforwards=tuple(map(FeedForwardConfig.from_dict, ("dense", "gated")))),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedConfig(FeedForwardConfig):
    """Chunked feed-forward: tokens are processed in chunks, which saves memory in training.

    Training stores no inner activations: each chunk is recomputed in the backward pass (activation
    checkpointing). The memory is chunk * F instead of B T F numbers for an extra forward pass of f; the
    reversible layers of the Reformer recompute f anyway.

    `inner`: any feed-forward that processes each token separately.
    """

    inner: FeedForwardConfig = dataclasses.field(
        default_factory=partial(FeedForwardConfig.from_dict, "dense")
    )
    chunk: PositiveInt = 512  # tokens, counted over all rows of the batch

    kind: ClassVar[str] = "chunked"
    paper: ClassVar[str] = "Kitaev et al. 2020 (Reformer), section 3"

    def __post_init__(self) -> None:
        if not self.inner.tokenwise:
            raise InputError(
                f"inner: {quote(self.inner.kind)} reads more than one token; put 'chunked' inside it instead"
            )

    def build(self, hidden_size: int) -> "Chunked":
        """Return the inner module, applied in chunks."""
        return Chunked(self.inner.build(hidden_size), self.chunk)

    def for_layer(self, layer: int) -> "ChunkedConfig":
        """Return the configuration with the inner feed-forward of layer `layer`."""
        return dataclasses.replace(self, inner=self.inner.for_layer(layer))

    @classmethod
    def examples(cls) -> tuple["ChunkedConfig", ...]:
        return cls(chunk=4), cls(inner=FeedForwardConfig.from_dict("gated"), chunk=1000)


class Chunked(FeedForward):
    """A module that maps x [..., E] to [..., E] chunk by chunk."""

    def __init__(self, inner: FeedForward, chunk: int):
        super().__init__()
        self.inner, self.chunk = inner, chunk

    def widen(self) -> None:
        """Return float32 for x in float16, if the inner module can."""
        self.inner.widen()

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return concat(f(x_1), f(x_2), ..), where each x_i has `chunk` tokens."""
        # [B T, E]: tokens are independent, so that chunks may cross rows.
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= self.chunk:
            return self._run_chunk(rows).view(x.shape)
        return torch.cat([self._run_chunk(part) for part in rows.split(self.chunk)]).view(x.shape)

    def _run_chunk(self, rows: Tensor) -> Tensor:
        """Return f of the tokens [N, E] of a chunk."""
        # Without checkpointing, the graph would keep the inner activations of all chunks.
        if self.training and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(self.inner, rows, use_reentrant=False)
        return self.inner(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeparableConvolutionConfig(SizedConfig):
    """Convolutional feed-forward: two separable convolutions with an activation between them.

    o ranges from 1 - w to 0 in a decoder, and from -(w - 1) // 2 to w // 2 in an encoder, where w is the
    width. Tokens beyond the text, padding and other documents are zeros in both convolutions. In decoding the
    state consists of the last w_1 - 1 vectors x and w_2 - 1 vectors h; tokens cannot be removed from it. A
    memory of earlier segments contains the state too, in training and in evaluation. A layer that was skipped
    in training starts the next segment from zeros.

    The cost is w_1 E + w_2 F products per token more than the dense feed-forward. The widths 3 and 5, the
    activation between the convolutions, a bias in each convolution and zeros for padding follow the authors'
    code (tensor2tensor, `sepconv_relu_sepconv`).

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
