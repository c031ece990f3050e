"""What a policy remembers by: trunks from vectors of observations to vectors, step by step or a run at once.

decoder        a decoder with the memory `recurrent`: every layer sees its inputs at the last M steps
lstm           a long short-term memory; Hochreiter and Schmidhuber 1997
feedforward    nothing: each step alone

An episode's first step sees nothing of the episode before it, row by row of a batch. A run of steps after a
state is what the same steps are one by one.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention import SoftmaxConfig
from polyformer.block.gated import GatedConfig
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.feedforward import DenseConfig
from polyformer.memory import RecurrentConfig
from polyformer.memory.recurrent import Hidden
from polyformer.ops.linear import Linear
from polyformer.patterns import Window
from polyformer.position import TransformerXLConfig
from polyformer.sequence.context import Context
from polyformer.stack import AttentionConfig, Stack, StackConfig
from polyformer.stack.layer import LayerState


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrunkConfig(Config):
    """Family of trunks."""

    def build(self, hidden_size: int) -> "Trunk":
        """The module, of vectors of this width."""
        raise NotImplementedError


class Trunk(nn.Module):
    """Vectors [B, T, E] -> [B, T, E], after what a state holds of the steps before."""

    def new_state(self, rows: int) -> State:
        """The state [B, ...] before the first step: tensors of a size that stays."""
        raise NotImplementedError

    def forward(self, x: Tensor, starts: Tensor, state: State) -> tuple[Tensor, State]:
        """The output and the next state. starts [B, T]: whether an episode begins with the step."""
        raise NotImplementedError


def _decoder() -> StackConfig:
    dense = SoftmaxConfig(backend="definition")  # the fastest for as few keys as these
    return StackConfig(
        num_hidden_layers=1,
        attention=AttentionConfig(num_attention_heads=2, mechanism=dense),
        feedforward=DenseConfig(intermediate_size=128),
        position=TransformerXLConfig(),
        block=GatedConfig(),
        dropout=0.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderTrunkConfig(TrunkConfig):
    """A decoder whose layers see the `memory_length` steps before each; the pattern and the memory of
    `decoder` follow from it."""

    memory_length: int = 32
    decoder: StackConfig = dataclasses.field(default_factory=_decoder)

    kind: ClassVar[str] = "decoder"
    paper: ClassVar[str] = "Parisotto et al. 2019 (GTrXL), section 3"

    def __post_init__(self) -> None:
        if self.memory_length < 1:
            raise InputError(f"memory_length: counts steps, expected 1 or more, got {self.memory_length}")
        if not isinstance(self.decoder.attention.mechanism, SoftmaxConfig):
            raise InputError("trunk.decoder.attention: a policy's memory is read by softmax attention alone")
        parts = [self.decoder.feedforward.at(layer) for layer in range(self.decoder.num_hidden_layers)]
        if any(part.stateful for part in parts):
            raise InputError(
                "trunk.decoder.feedforward: a policy keeps the inputs of its layers alone, and this "
                "feed-forward keeps tokens of its own; use 'dense' or 'gated'"
            )

    def build(self, hidden_size: int) -> "DecoderTrunk":
        """A stack with a memory."""
        memory = RecurrentConfig(length=self.memory_length)
        config = self.decoder.override("memory", memory).override(
            "attention.mechanism.pattern", Window(self.memory_length, 0)
        )
        return DecoderTrunk(Stack(config, hidden_size, self.memory_length, cross=False), hidden_size)


@dataclasses.dataclass(frozen=True)
class Steps(State):
    """What a decoder keeps: the inputs of its layers at the last M steps, [B, L, M, E], and how many of them
    are of the episode, [B]."""

    memory: Tensor
    age: Tensor


class DecoderTrunk(Trunk):
    """In acting too the memory holds inputs of layers, not keys: weights change while an episode goes on."""

    def __init__(self, stack: Stack, hidden_size: int):
        super().__init__()
        self.stack, self.hidden_size = stack, hidden_size

    @property
    def length(self) -> int:
        """M."""
        assert self.stack.memory is not None
        return self.stack.memory.length

    def new_state(self, rows: int) -> Steps:
        """Steps of no episode."""
        weight = next(self.parameters())
        memory = weight.new_zeros(rows, len(self.stack.groups), self.length, self.hidden_size)
        return Steps(memory, torch.zeros(rows, dtype=torch.long, device=weight.device))

    def forward(self, x: Tensor, starts: Tensor, state: State) -> tuple[Tensor, Steps]:
        """Episodes are documents; slots of the memory that hold nothing are of one that nobody reads."""
        assert isinstance(state, Steps)
        length, new = self.length, x.shape[1]
        episode = starts.long().cumsum(1)
        slots = torch.arange(length, device=x.device)
        remembered = (slots >= length - state.age[:, None]).long() - 1
        context = Context(
            new, length + new, causal=True, q_doc=episode, kv_doc=torch.cat([remembered, episode], 1)
        )
        pos = torch.arange(length, length + new, device=x.device)
        x = self.stack.position.embed(x, pos, 0)
        layers = tuple(LayerState(memory=Hidden(vectors)) for vectors in state.memory.unbind(1))
        y, after = self.stack(x, pos, context, None, layers)
        assert after is not None
        memory = torch.stack([layer.memory.vectors for layer in after], 1)
        going_on = torch.where(episode[:, -1] == 0, state.age, 0)
        age = (going_on + (episode == episode[:, -1:]).sum(1)).clamp_max(length)
        return y, Steps(memory, age)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSTMTrunkConfig(TrunkConfig):
    """Layers one over the other."""

    num_hidden_layers: int = 1

    kind: ClassVar[str] = "lstm"
    paper: ClassVar[str] = "Hochreiter and Schmidhuber 1997"

    def __post_init__(self) -> None:
        _check_layers(self.num_hidden_layers)

    def build(self, hidden_size: int) -> "LSTMTrunk":
        """`torch.nn.LSTM`."""
        return LSTMTrunk(hidden_size, self.num_hidden_layers)


@dataclasses.dataclass(frozen=True)
class Cells(State):
    """[B, L, E] each."""

    hidden: Tensor
    cell: Tensor


class LSTMTrunk(Trunk):
    """Runs of steps in which no episode of the batch begins are computed at once."""

    def __init__(self, hidden_size: int, layers: int):
        super().__init__()
        self.lstm = nn.LSTM(hidden_size, hidden_size, layers, batch_first=True)

    def new_state(self, rows: int) -> Cells:
        """Zeros."""
        weight = next(self.parameters())
        zeros = weight.new_zeros(rows, self.lstm.num_layers, self.lstm.hidden_size)
        return Cells(zeros, zeros.clone())

    def forward(self, x: Tensor, starts: Tensor, state: State) -> tuple[Tensor, Cells]:
        """Rows in which an episode begins go on from zeros."""
        assert isinstance(state, Cells)
        hidden, cell = state.hidden.transpose(0, 1), state.cell.transpose(0, 1)
        cuts = [t for t, any_row in enumerate(starts.any(0).tolist()) if any_row and t]
        outputs = []
        for first, end in zip([0, *cuts], [*cuts, x.shape[1]]):
            kept = (~starts[:, first]).to(x.dtype)[:, None]
            y, (hidden, cell) = self.lstm(
                x[:, first:end], ((hidden * kept).contiguous(), (cell * kept).contiguous())
            )
            outputs.append(y)
        return torch.cat(outputs, 1), Cells(hidden.transpose(0, 1), cell.transpose(0, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForwardTrunkConfig(TrunkConfig):
    """Matrices with ReLU."""

    num_hidden_layers: int = 2

    kind: ClassVar[str] = "feedforward"

    def __post_init__(self) -> None:
        _check_layers(self.num_hidden_layers)

    def build(self, hidden_size: int) -> "FeedForwardTrunk":
        """As many as layers."""
        return FeedForwardTrunk(hidden_size, self.num_hidden_layers)


@dataclasses.dataclass(frozen=True)
class Nothing(State):
    """What is kept where nothing is."""


class FeedForwardTrunk(Trunk):
    """No step knows of another."""

    def __init__(self, hidden_size: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Linear(hidden_size, hidden_size) for _ in range(layers))

    def new_state(self, rows: int) -> Nothing:
        """Nothing."""
        return Nothing()

    def forward(self, x: Tensor, starts: Tensor, state: State) -> tuple[Tensor, State]:
        """ReLU(W x + b), layer by layer."""
        for layer in self.layers:
            x = layer(x).relu()
        return x, state


def _check_layers(count: int) -> None:
    if count < 1:
        raise InputError(f"num_hidden_layers: expected 1 or more, got {count}")
