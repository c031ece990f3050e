"""Layers for studies; a recipe imports this module.

Without one of their parts: to measure what the part adds. Classification by a decoder: from its last token
(Radford et al. 2018, section 3.2). Feed-forward layers with weights of few bits, rounded in training too:

    w' = s round(w / s)        s = max |w| / (2^(bits - 1) - 1) of each row of a matrix

In training the gradient passes the rounding unchanged: the straight-through estimator of Bengio et al. 2013,
used for integers by Jacob et al. 2018, section 3.

Recurrent baselines, with the tasks and scores of the Transformers:

    feedforward `lstm`: y_1 .. y_T = LSTM(x_1 .. x_T), instead of a feed-forward of each token
    attention `none`: no self-attention; the cross-attention is softmax (Bahdanau et al. 2015)
    attention `ends`: no self-attention; the cross-attention is W_k h_1 + W_v h_S for every target token

h_1 and h_S are the first and the last output of the encoder: the last states of its two directions. `ends` is
the encoder-decoder of Cho et al. 2014 (section 2.2), which reads a source as a single vector. The projections
of the absent self-attention remain, without an effect.

`RecurrentWriter` copies and reverses strings:

    state of the decoder at step 0 = last states of the bidirectional encoder (Cho et al. 2014)
    with attention: c_t = sum_s softmax(y_t W h_s) h_s is read next to y_t (Luong et al. 2015, section 3.1)
"""

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from polyformer.attention.mechanisms import Mechanism, MechanismConfig
from polyformer.attention.mechanisms.base import PositionTerms
from polyformer.attention.mechanisms.recurrence.members import Retention, RetentionConfig
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.attention.patterns import Pattern
from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.core.ranges import PositiveShare
from polyformer.core.sequence.context import Context
from polyformer.core.state import State
from polyformer.data import Tokenizer
from polyformer.nn.block.wirings import Block, BlockConfig, SubLayer
from polyformer.nn.feedforward.feedforward import Dense, DenseConfig, FeedForward, FeedForwardConfig
from polyformer.nn.heads import ClassifyConfig
from polyformer.training.tasks import Classification, ClassificationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainBlockConfig(BlockConfig):
    """Plain block: sub-layers follow each other without residual sums."""

    kind: ClassVar[str] = "plain"

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "PlainBlock":
        """Return a block with a norm for each sub-layer."""
        return PlainBlock(hidden_size, sublayers, norm, dropout)


class PlainBlock(Block):
    """The wiring of pre-norm without the residual stream."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = dropout(f(norm(x))) for each f in turn."""
        for norm, sublayer in zip(self.norms, sublayers):
            x = self.dropout(sublayer(normalize(norm, x, valid)))
        return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoNormConfig(NormConfig):
    """No norm: vectors are returned as they are."""

    kind: ClassVar[str] = "none"

    def build(self, width: int) -> nn.Module:
        """Return the identity."""
        return nn.Identity()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantRetentionConfig(RetentionConfig):
    """Retention with the same decay `gamma` in all heads; with 1 nothing is forgotten."""

    gamma: PositiveShare = 1.0

    kind: ClassVar[str] = "constant_retention"

    def build(self, num_heads: int, head_size: int) -> "ConstantRetention":
        """Return the module with the parameters of retention."""
        return ConstantRetention(self, num_heads, head_size)


class ConstantRetention(Retention):
    """Retention without decays by head."""

    config: ConstantRetentionConfig

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return the inputs of retention with log gamma as the decay."""
        inputs = super().inputs(q, k, v, gates)
        decay = q.new_full((*v.shape[:3], 1), math.log(self.config.gamma))
        return dataclasses.replace(inputs, decay=decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderClassificationConfig(ClassificationConfig):
    """Text classification by a decoder."""

    kind: ClassVar[str] = "classify_by_decoder"
    paper: ClassVar[str] = "Radford et al. 2018 (GPT), section 3.2"


class DecoderClassification(Classification, config=DecoderClassificationConfig):
    """Classification with a linear layer on the hidden state of the last token."""

    def __init__(self, config: DecoderClassificationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        options = {**self.architecture.head_options, "pooling": "last", "hidden": False}
        self.architecture = dataclasses.replace(
            self.architecture, stacks="decoder", head=ClassifyConfig(**options), head_options=options
        )


Bits = Annotated[int, Interval(ge=2, le=16)]


class Rounding(nn.Module):
    """The rounding of a matrix, with the gradient of the identity."""

    def __init__(self, bits: int):
        super().__init__()
        self.largest = 2 ** (bits - 1) - 1

    def forward(self, weight: Tensor) -> Tensor:
        """Return weight [O, I] on a grid of 2 largest + 1 numbers per row."""
        step = weight.detach().abs().amax(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        step = step / self.largest
        return weight + (step * (weight.detach() / step).round() - weight.detach())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundedConfig(DenseConfig):
    """Dense feed-forward layer with matrices that are rounded in every pass."""

    bits: Bits = 4

    kind: ClassVar[str] = "rounded"
    paper: ClassVar[str] = "Jacob et al. 2018, section 3"

    def build(self, hidden_size: int) -> Dense:
        """Return a dense layer with rounded matrices."""
        return with_rounding(super().build(hidden_size), self.bits)


def with_rounding(layer: Dense, bits: int) -> Dense:
    """Round the two matrices of a layer in every pass, and return the layer."""
    for linear in (layer.up, layer.down):
        parametrize.register_parametrization(linear, "weight", Rounding(bits))
    return layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSTMConfig(FeedForwardConfig):
    """LSTM: a recurrent layer of the width of the model, or two of half the width for `bidirectional`."""

    bidirectional: bool = False

    kind: ClassVar[str] = "lstm"
    tokenwise: ClassVar[bool] = False
    stateful: ClassVar[bool] = True

    def build(self, hidden_size: int) -> "LSTMLayer":
        """Return the layer."""
        return LSTMLayer(hidden_size, self.bidirectional)


@dataclasses.dataclass(frozen=True)
class LSTMState(State):
    """The last output h and the last cell c of a text: [B, E] each, None before the first token."""

    h: Tensor | None = None
    c: Tensor | None = None


class LSTMLayer(FeedForward):
    """torch's LSTM over the tokens of a row, across its documents; padding must be on the right."""

    def __init__(self, hidden_size: int, bidirectional: bool):
        super().__init__()
        width = hidden_size // 2 if bidirectional else hidden_size
        self.lstm = nn.LSTM(hidden_size, width, batch_first=True, bidirectional=bidirectional)

    def new_state(self) -> LSTMState:
        """Return the state before the first token."""
        return LSTMState()

    def forward(
        self, x: Tensor, context: Context | None = None, state: LSTMState | None = None
    ) -> Tensor | tuple[Tensor, LSTMState]:
        """Return y [B, T, E], and with a `state` also the next state."""
        if self.lstm.bidirectional:
            return self._both_directions(x, None if context is None else context.q_valid)
        past = None
        if state is not None and state.h is not None and state.c is not None:
            past = state.h.unsqueeze(0), state.c.unsqueeze(0)
        y, (h, c) = self.lstm(x, past)
        return y if state is None else (y, LSTMState(h[0], c[0]))

    def _both_directions(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return y; the backward direction starts at the last token that is not padding."""
        if valid is None:
            return self.lstm(x)[0]
        rows = pack_padded_sequence(x, valid.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(rows)[0], batch_first=True, total_length=x.shape[1])[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoAttentionConfig(MechanismConfig):
    """No self-attention: zeros, which leave the residual stream as it is."""

    kind: ClassVar[str] = "none"
    pairs: ClassVar[bool] = False

    def build(self, num_heads: int, head_size: int) -> "NoAttention":
        """Return the module without parameters."""
        return NoAttention()


class NoAttention(Mechanism):
    """Zeros of the shape of the queries."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return zeros of the shape of q, and no state."""
        return q.new_zeros(q.shape), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndsConfig(NoAttentionConfig):
    """No self-attention, and a single vector of the source instead of cross-attention."""

    kind: ClassVar[str] = "ends"

    def cross(self, pattern: Pattern | None = None) -> "EndsOfSourceConfig":
        """Return the sum of the ends of the source."""
        return EndsOfSourceConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndsOfSourceConfig(MechanismConfig):
    """The key of the first token of the source plus the value of the last."""

    kind: ClassVar[str] = "ends_of_source"
    pairs: ClassVar[bool] = False

    def build(self, num_heads: int, head_size: int) -> "EndsOfSource":
        """Return the module without parameters."""
        return EndsOfSource()


class EndsOfSource(Mechanism):
    """A vector of the source, the same for all queries; padding must be on the right."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return k_1 + v_S [B, H, Tq, D], and no state."""
        last = v[:, :, -1:]
        if context.kv_valid is not None:
            index = context.kv_valid.sum(1).long() - 1
            last = v.take_along_dim(index.view(-1, 1, 1, 1), 2)
        return (k[:, :, :1] + last).expand_as(q), None


class RecurrentWriter(nn.Module):
    """An LSTM that writes a string after another LSTM has read one; both are `hidden_size` wide."""

    def __init__(self, vocab_size: int, start: int, hidden_size: int, attention: bool):
        super().__init__()
        self.start = start
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.reader = nn.LSTM(hidden_size, hidden_size // 2, batch_first=True, bidirectional=True)
        self.writer = nn.LSTM(hidden_size, hidden_size, batch_first=True)
        self.query = nn.Linear(hidden_size, hidden_size, bias=False) if attention else None
        self.output = nn.Linear(hidden_size * (2 if attention else 1), vocab_size)

    def forward(self, source: Tensor, labels: Tensor, start: Tensor) -> SimpleNamespace:
        """Return loss and predictions of targets [B, T] for sources [B, S]; `start` has no effect."""
        read, last = self.reader(self.tokens(source))
        state = tuple(x.transpose(0, 1).flatten(1).unsqueeze(0) for x in last)
        before = torch.cat([labels.new_full((len(labels), 1), self.start), labels[:, :-1]], 1)
        y, _ = self.writer(self.tokens(before), state)
        if self.query is not None:
            y = torch.cat([y, torch.softmax(self.query(y) @ read.mT, -1) @ read], -1)
        logits = self.output(y)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)
