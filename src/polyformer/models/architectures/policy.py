"""A policy: maps observations and a memory of the episode to the logits of actions and a value.

A trunk is a network with a memory that maps a sequence of observation vectors to hidden states:

decoder        a decoder with the memory `recurrent`: every layer sees its inputs at the last M steps
lstm           a long short-term memory; Hochreiter and Schmidhuber 1997
feedforward    no memory: each step is independent

The first step of an episode, separately for each row of a batch, sees no step of an earlier episode. A
sequence of steps after a state has the same results as single steps.

    x_t = ReLU(W o_t + b)        h_t = trunk(x_t, memory of the episode's steps before t)
    policy(a | o_1 ... o_t) = softmax(W_a h_t + b_a)_a        value(o_1 ... o_t) = W_v h_t + b_v

Continuous actions are vectors from normal(W_a h_t + b_a, exp(s)), with deviations s that do not depend on the
observations (Schulman et al. 2015); -1 and 1 are the environment's bounds.

With a trunk of gated decoder layers this is GTrXL (Parisotto et al. 2019, section 3); with layers of the
block `post` it is the Transformer-XL that the paper compares with. The state is passed in and returned.
"""

import contextlib
import dataclasses
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import TransformerXLConfig
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.softmax import recorded
from polyformer.core.ranges import PositiveInt, UnitFloat, check_sizes
from polyformer.core.sequence.context import Context
from polyformer.core.state import State
from polyformer.models.architectures.pretrained import PretrainedMixin
from polyformer.models.initialization import initialize
from polyformer.models.plugins import ConfigWithImports
from polyformer.nn.block.gated import GatedBlockConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.memory import RecurrentConfig
from polyformer.nn.memory.recurrent import Hidden
from polyformer.nn.stack import AttentionConfig, Stack, StackConfig, build_stack
from polyformer.nn.stack.layer import LayerState

S = TypeVar("S", bound=State)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrunkConfig(Config):
    """The base class of trunk configurations."""

    def build(self, hidden_size: int) -> "Trunk":
        """Return the module, for vectors of this width."""
        raise NotImplementedError


def checked(state: object, kind: type[S], **shapes: tuple[int, ...]) -> S:
    """Return a state of this kind; raises `InputError` for another, or for tensors of other shapes."""
    if not isinstance(state, kind):
        raise InputError(f"state: expected {kind.__name__}, which this policy returned, got {quote(state)}")
    for name, shape in shapes.items():
        got = tuple(getattr(state, name).shape)
        if got != shape:
            raise InputError(
                f"state: expected {name} of the shape {shape}, got {got}; pass a state that this policy "
                "returned for the same rows"
            )
    return state


class Trunk(nn.Module):
    """A module that maps vectors [B, T, E] to [B, T, E], with a state of the earlier steps."""

    def new_state(self, rows: int) -> State:
        """Return the state [B, ...] before the first step: tensors of constant sizes."""
        raise NotImplementedError

    def forward(self, x: Tensor, starts: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the output and the next state. starts [B, T]: true at the first step of an episode."""
        raise NotImplementedError


def _decoder() -> StackConfig:
    dense = SoftmaxConfig(backend="definition")  # the fastest backend for few keys
    return StackConfig(
        num_hidden_layers=1,
        attention=AttentionConfig(num_attention_heads=2, mechanism=dense),
        feedforward=DenseConfig(intermediate_size=128),
        position=TransformerXLConfig(),
        block=GatedBlockConfig(),
        dropout=0.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderTrunkConfig(TrunkConfig):
    """Decoder trunk: a Transformer that attends to a fixed number of earlier steps.

    Each layer of the decoder sees the `memory_length` steps before a step; the pattern and the memory of
    `decoder` are set accordingly.
    """

    memory_length: PositiveInt = 32
    decoder: StackConfig = dataclasses.field(default_factory=_decoder)

    kind: ClassVar[str] = "decoder"
    paper: ClassVar[str] = "Parisotto et al. 2019 (GTrXL), section 3"

    def __post_init__(self) -> None:
        if not isinstance(self.decoder.attention.mechanism, SoftmaxConfig):
            raise InputError("trunk.decoder.attention: a policy's memory requires softmax attention")
        parts = [self.decoder.feedforward.for_layer(layer) for layer in range(self.decoder.num_hidden_layers)]
        if any(part.stateful for part in parts):
            raise InputError(
                "trunk.decoder.feedforward: a policy stores only the inputs of its layers, and this "
                "feed-forward has a state of its own; use 'dense' or 'gated'"
            )

    def build(self, hidden_size: int) -> "DecoderTrunk":
        memory = RecurrentConfig(length=self.memory_length)
        config = self.decoder.override("memory", memory).override(
            "attention.mechanism.pattern", Window(self.memory_length, 0)
        )
        return DecoderTrunk(build_stack(config, hidden_size, self.memory_length), hidden_size)


@dataclasses.dataclass(frozen=True)
class Steps(State):
    """The state of a decoder trunk: the inputs of its layers at the last M steps, [B, L, M, E], and the
    number of these steps that belong to the present episode, [B]."""

    memory: Tensor
    age: Tensor


class DecoderTrunk(Trunk):
    """A decoder trunk. The memory contains inputs of layers instead of keys also in acting, because the
    weights change during an episode."""

    def __init__(self, stack: Stack, hidden_size: int):
        super().__init__()
        self.stack, self.hidden_size = stack, hidden_size

    @property
    def length(self) -> int:
        """Return M, the number of steps in the memory."""
        assert self.stack.memory is not None
        return self.stack.memory.length

    def new_state(self, rows: int) -> Steps:
        weight = next(self.parameters())
        memory = weight.new_zeros(rows, len(self.stack.groups), self.length, self.hidden_size)
        return Steps(memory, torch.zeros(rows, dtype=torch.long, device=weight.device))

    def forward(self, x: Tensor, starts: Tensor, state: State) -> tuple[Tensor, Steps]:
        """Run the stack with episodes as documents; no query sees empty slots of the memory."""
        length, (rows, new, width) = self.length, x.shape
        state = checked(state, Steps, memory=(rows, len(self.stack.groups), length, width), age=(rows,))
        episode = starts.long().cumsum(1)
        # Valid slots get document 0, which is the episode of the state; empty slots get -1.
        slots = torch.arange(length, device=x.device)
        remembered = (slots >= length - state.age[:, None]).long() - 1
        context = Context(
            new, length + new, causal=True, q_doc=episode, kv_doc=torch.cat([remembered, episode], 1)
        )
        # The M slots of the memory have the positions before the new steps.
        pos = torch.arange(length, length + new, device=x.device)
        x = self.stack.position.embed(x, pos, 0)
        layers = tuple(LayerState(memory=Hidden(vectors)) for vectors in state.memory.unbind(1))
        y, after = self.stack.run(x, pos, context, None, layers)
        assert after is not None
        # The last M inputs of each layer, [B, L, M, E].
        memory = torch.stack([layer.memory.vectors for layer in after], 1)
        # The steps of the episode that is still running.
        continuing = torch.where(episode[:, -1] == 0, state.age, 0)
        age = (continuing + (episode == episode[:, -1:]).sum(1)).clamp_max(length)
        return y, Steps(memory, age)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSTMTrunkConfig(TrunkConfig):
    """LSTM trunk: stacked layers of long short-term memory."""

    num_hidden_layers: PositiveInt = 1

    kind: ClassVar[str] = "lstm"
    paper: ClassVar[str] = "Hochreiter and Schmidhuber 1997"

    def build(self, hidden_size: int) -> "LSTMTrunk":
        return LSTMTrunk(hidden_size, self.num_hidden_layers)


@dataclasses.dataclass(frozen=True)
class Cells(State):
    """The hidden state and the cell state of an LSTM, [B, L, E] each."""

    hidden: Tensor
    cell: Tensor


class LSTMTrunk(Trunk):
    """An LSTM trunk. Steps between two starts of episodes in the batch are computed in a single call."""

    def __init__(self, hidden_size: int, layers: int):
        super().__init__()
        self.lstm = nn.LSTM(hidden_size, hidden_size, layers, batch_first=True)

    def new_state(self, rows: int) -> Cells:
        weight = next(self.parameters())
        zeros = weight.new_zeros(rows, self.lstm.num_layers, self.lstm.hidden_size)
        return Cells(zeros, zeros.clone())

    def forward(self, x: Tensor, starts: Tensor, state: State) -> tuple[Tensor, Cells]:
        """Run the LSTM; rows that begin an episode start from zeros."""
        shape = len(x), self.lstm.num_layers, self.lstm.hidden_size
        state = checked(state, Cells, hidden=shape, cell=shape)
        hidden, cell = state.hidden.transpose(0, 1), state.cell.transpose(0, 1)
        # A segment ends where any row begins an episode, because `nn.LSTM` cannot reset its state.
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
    """Feed-forward trunk: linear layers with ReLU, without a memory."""

    num_hidden_layers: PositiveInt = 2

    kind: ClassVar[str] = "feedforward"

    def build(self, hidden_size: int) -> "FeedForwardTrunk":
        return FeedForwardTrunk(hidden_size, self.num_hidden_layers)


@dataclasses.dataclass(frozen=True)
class Nothing(State):
    """The empty state of a trunk without a memory."""


class FeedForwardTrunk(Trunk):
    """A feed-forward trunk, in which each step is independent of the others."""

    def __init__(self, hidden_size: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Linear(hidden_size, hidden_size) for _ in range(layers))

    def new_state(self, rows: int) -> Nothing:
        return Nothing()

    def forward(self, x: Tensor, starts: Tensor, state: State) -> tuple[Tensor, State]:
        """Apply ReLU(W x + b) for each layer."""
        state = checked(state, Nothing)
        for layer in self.layers:
            x = layer(x).relu()
        return x, state


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig(ConfigWithImports):
    """The configuration of a policy; the environment determines the sizes of observations and actions."""

    observation_size: PositiveInt = 4
    num_actions: PositiveInt = 4  # number of choices, or size of an action vector
    continuous: bool = False  # an action is a vector
    hidden_size: PositiveInt = 64
    trunk: TrunkConfig = DecoderTrunkConfig()
    initializer_range: UnitFloat | None = None

    paper: ClassVar[str] = "Parisotto et al. 2019 (GTrXL), section 3"
    weights: ClassVar[None] = None  # never int8, see `weights.py`
    origin: ClassVar[None] = None  # no family of public checkpoints has it

    def __post_init__(self) -> None:
        check_sizes(self)


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyOutput:
    """The logits [B, T, A] of the actions (the means of continuous actions) and the values [B, T] of T steps;
    hidden [B, T, E], the input of both; the state after the steps. attentions: if requested, [B, H, T, M + T]
    per layer."""

    logits: Tensor
    values: Tensor
    hidden: Tensor
    state: State
    attentions: tuple[Tensor, ...] | None = None


class Policy(PretrainedMixin):
    """A policy network with an actor head and a value head on one trunk; see `forward`."""

    config_type = PolicyConfig
    config: PolicyConfig
    supports_recurrence = True  # training passes the state of one batch to the next

    def __init__(self, config: PolicyConfig):
        super().__init__(config)
        width = config.hidden_size
        self.observations = Linear(config.observation_size, width)
        self.trunk: Trunk = config.trunk.build(width)
        self.actions = Linear(width, config.num_actions)
        self.values = Linear(width, 1)
        initialize(self, config.initializer_range)
        with torch.no_grad():
            self.actions.weight.mul_(0.01)  # all actions have nearly equal probability at first
        if config.continuous:
            self.log_deviations = nn.Parameter(torch.zeros(config.num_actions))

    def new_state(self, rows: int) -> State:
        """Return the state of `rows` rows before the first step."""
        return self.trunk.new_state(rows)

    def distribution(self, logits: Tensor) -> Distribution:
        """Return the distribution of actions for `logits` [..., A]."""
        if not self.config.continuous:
            return Categorical(logits=logits)
        # A vector has a single probability, the product over its numbers.
        return Independent(Normal(logits, self.log_deviations.exp()), 1)

    def hidden(self, observations: Tensor, starts: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the input of the heads, [B, T, E], and the next state: as `forward`, without the heads."""
        size = self.config.observation_size
        if observations.dim() != 3 or observations.shape[-1] != size or not observations.is_floating_point():
            raise InputError(
                f"observations: expected numbers [batch, steps, {size}], got {observations.dtype} "
                f"{list(observations.shape)}"
            )
        if starts.shape != observations.shape[:2] or starts.dtype != torch.bool:
            raise InputError(
                f"starts: expected truth values {list(observations.shape[:2])}, got {starts.dtype} "
                f"{list(starts.shape)}"
            )
        return self.trunk(self.observations(observations).relu(), starts, state)

    def forward(
        self,
        observations: Tensor,
        starts: Tensor | None = None,
        state: State | None = None,
        output_attentions: bool = False,
    ) -> PolicyOutput:
        """Process T steps of each row.

        Args:
            observations: [B, T, O], of floating point.
            starts: [B, T] bool, true at the first step of an episode, which sees no earlier steps; the
                default is all false.
            state: the state after the steps before; by default there were none.
            output_attentions: also return the attention weights; the first M keys are the memory's.

        Raises `InputError` for shapes that do not fit.
        """
        if state is None:
            state = self.new_state(len(observations))
        # A batch may continue episodes only.
        if starts is None:
            starts = torch.zeros(observations.shape[:2], dtype=torch.bool, device=observations.device)
        with recorded() if output_attentions else contextlib.nullcontext([]) as records:
            hidden, after = self.hidden(observations, starts, state)
        attentions = tuple(records) if output_attentions else None
        return PolicyOutput(self.actions(hidden), self.values(hidden).squeeze(-1), hidden, after, attentions)
