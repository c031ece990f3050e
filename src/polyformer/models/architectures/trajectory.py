"""Decision Transformer: a decoder that reads trajectories and predicts actions for a given return.

    R_1 s_1 a_1  R_2 s_2 a_2 ...        R_t = r_t + r_t+1 + ...   the return-to-go
    token = norm(W_kind value + timesteps[t])                    three tokens per step, with one timestep
    a_t from the token of s_t;  s_t+1 and R_t+1 from the token of a_t

It is trained on recorded steps with the mean squared error of their actions, and conditioned on the desired
return for acting. `act` takes single steps and runs only the tokens of the new step and the previous action,
with the past in a state. Cost: a decoder on 3 T tokens. Chen et al. 2021, section 3. States and returns are
predicted in addition to the paper's actions, as in its code, but have no loss.
"""

import contextlib
import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.positions import NoPositionConfig
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.host_values import bounds
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import LayerNorm
from polyformer.core.ops.softmax import recorded
from polyformer.core.ranges import PositiveInt, Probability, UnitFloat, check_sizes
from polyformer.core.sequence.context import Context
from polyformer.models.architectures.arguments import check_mask, check_state
from polyformer.models.architectures.pretrained import PretrainedMixin
from polyformer.models.config import OriginConfig
from polyformer.models.initialization import initialize
from polyformer.models.outputs import TrajectoryState
from polyformer.models.plugins import ConfigWithImports
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.stack import AttentionConfig, StackConfig, build_stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionConfig(Config):
    """The sizes of states and actions, which are both inputs and predictions."""

    state_size: PositiveInt = 17
    action_size: PositiveInt = 4
    bounded: bool = True  # actions between -1 and 1, by tanh


def _decoder() -> StackConfig:
    return StackConfig(
        num_hidden_layers=3,
        attention=AttentionConfig(num_attention_heads=1),
        feedforward=DenseConfig(intermediate_size=512),
        position=NoPositionConfig(),
        block=PreNormConfig(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrajectoryConfig(ConfigWithImports):
    """The sizes of a Decision Transformer; by default as for OpenAI Gym in the paper (appendix A): three
    layers of width 128 with one head.

    All tokens have position 0 in the decoder's position scheme: their timesteps encode the order.
    """

    hidden_size: PositiveInt = 128
    max_timesteps: PositiveInt = 4096  # rows of the table of timesteps
    max_position_embeddings: PositiveInt = 1024  # of a decoder with learned positions
    embedding_dropout: Probability = 0.1
    decoder: StackConfig = dataclasses.field(default_factory=_decoder)
    head: PredictionConfig = PredictionConfig()
    initializer_range: UnitFloat | None = 0.02
    origin: OriginConfig | None = dataclasses.field(default=None, compare=False)

    paper: ClassVar[str] = "Chen et al. 2021, section 3"
    weights: ClassVar[None] = None  # never int8, see `weights.py`

    def __post_init__(self) -> None:
        check_sizes(self)
        self.decoder.attention.mechanism.require("causal")


@dataclasses.dataclass(frozen=True, eq=False)
class TrajectoryOutput:
    """The predictions of a Decision Transformer; optional fields are None unless requested.

    loss: of the actions. actions [B, T, A] of every step; states [B, T, S] and returns [B, T, 1] of the step
    after it. hidden_states: [B, 3 T, E], the input of every layer and the final output. attentions:
    [B, H, 3 T, 3 T] per layer.
    """

    loss: Tensor | None
    actions: Tensor
    states: Tensor
    returns: Tensor
    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class Predictions(nn.Module):
    """Linear predictions from the hidden states [B, T, E] of steps."""

    def __init__(self, hidden_size: int, config: PredictionConfig):
        super().__init__()
        self.bounded = config.bounded
        self.states = Linear(hidden_size, config.state_size)
        self.actions = Linear(hidden_size, config.action_size)
        self.returns = Linear(hidden_size, 1)

    def action(self, hidden: Tensor) -> Tensor:
        """Return the actions [B, T, A]."""
        actions = self.actions(hidden)
        return actions.tanh() if self.bounded else actions


class TrajectoryTransformer(PretrainedMixin):
    """A Decision Transformer; see `forward`. It generates no text, so it has no settings for `generate`."""

    config_type = TrajectoryConfig
    config: TrajectoryConfig

    def __init__(self, config: TrajectoryConfig):
        super().__init__(config)
        width, sizes = config.hidden_size, config.head
        self.timesteps = nn.Embedding(config.max_timesteps, width)
        self.returns = Linear(1, width)
        self.states = Linear(sizes.state_size, width)
        self.actions = Linear(sizes.action_size, width)
        self.norm = LayerNorm(width)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.decoder = build_stack(config.decoder, width, config.max_position_embeddings)
        self.head = Predictions(width, sizes)
        initialize(self, config.initializer_range)

    def forward(
        self,
        states: Tensor,
        actions: Tensor,
        returns_to_go: Tensor,
        timesteps: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> TrajectoryOutput:
        """Predict the action of each of T steps from the tokens before it.

        Args:
            states, actions, returns_to_go: [B, T, S], [B, T, A], [B, T, 1]. The action of the step to predict
                may have any value: no prediction of this step depends on it.
            timesteps: [B, T], the number of each step in its episode.
            attention_mask: [B, T], 1 for real steps and 0 for padding, on either side.
            labels: [B, T, A], the actions to predict.
            output_attentions, output_hidden_states: also return them.

        Raises `InputError` for shapes that do not fit, and timesteps beyond the table.
        """
        self._check(timesteps, states=states, actions=actions, returns_to_go=returns_to_go)
        rows, steps = timesteps.shape
        # [B, T, 3, E] to [B, 3 T, E], in the order R_t, s_t, a_t.
        x = torch.stack([self.returns(returns_to_go), self.states(states), self.actions(actions)], 2)
        x = self.norm(x + self.timesteps(timesteps).unsqueeze(2)).flatten(1, 2)
        if attention_mask is not None:
            check_mask("attention_mask", attention_mask, (rows, steps))
        valid = None if attention_mask is None else attention_mask.bool()
        # Each step is three tokens. Attention without a mask has faster kernels.
        real = None if valid is None or bool(valid.all()) else valid.repeat_interleave(3, 1)
        context = Context(3 * steps, 3 * steps, causal=True, kv_valid=real)
        # Tokens of a step share a timestep, which encodes the order instead of positions.
        pos = timesteps.new_zeros(3 * steps)
        x = self.dropout(self.decoder.position.embed(x, pos, 0))
        collect: list[Tensor] | None = [] if output_hidden_states else None
        with recorded() if output_attentions else contextlib.nullcontext([]) as records:
            hidden, _ = self.decoder.run(x, pos, context, collect=collect)
        # [B, 3 T, E] to three times [B, T, E], of returns, states and actions.
        _, state, action = hidden.view(rows, steps, 3, -1).unbind(2)
        predicted = self.head.action(state)
        return TrajectoryOutput(
            None if labels is None else squared_error(predicted, labels, valid),
            predicted,
            self.head.states(action),
            self.head.returns(action),
            hidden,
            None if collect is None else tuple(collect),
            tuple(records) if output_attentions else None,
        )

    def act(
        self,
        states: Tensor,
        returns_to_go: Tensor,
        timesteps: Tensor,
        previous: Tensor | None = None,
        state: TrajectoryState | None = None,
        context: int | None = None,
    ) -> tuple[Tensor, TrajectoryState]:
        """Return the actions [B, A] of one more step, and the next state; runs only three tokens.

        Args:
            states, returns_to_go, timesteps: of this step, [B, S], [B, 1] and [B].
            previous: [B, A], the actions of the step before; None in the first step.
            state: from the step before; None in the first step.
            context: the number of visible steps, with this step; None for all. The keys and values of earlier
                steps are dropped; the remaining keys and values were computed when more steps were visible.

        Without a limit the actions are the same as from `forward` with all steps so far. Raises `InputError`
        as `forward`, and if only `previous` or only `state` is given.
        """
        if (state is None) != (previous is None):
            raise InputError(
                "previous and state: expected both from the second step on, and none in the first"
            )
        values = {"states": states, "returns_to_go": returns_to_go}
        if previous is not None:
            values["actions"] = previous
        steps = {name: value[:, None] for name, value in values.items()}
        self._check(timesteps[:, None], least=0 if previous is None else 1, **steps)  # a step before this one
        if state is not None:
            check_state(state, TrajectoryState, self.decoder, len(timesteps))
        tokens, times = [self.returns(returns_to_go), self.states(states)], [timesteps, timesteps]
        if context == 1:  # the previous action belongs to the step before, which is not visible
            previous = state = None
        if state is not None and previous is not None:
            # The action of the last step is only known now, and is read first.
            tokens, times = [self.actions(previous), *tokens], [timesteps - 1, *times]
            if context is not None:
                # With the three new tokens these are `context` steps without the last action.
                state = state.last(3 * context - 4)
        x = self.norm(torch.stack(tokens, 1) + self.timesteps(torch.stack(times, 1)))
        before = 0 if state is None else state.length
        length = before + x.shape[1]
        layers = self.decoder.new_states(0) if state is None else state.layers
        where = Context(x.shape[1], length, causal=True)
        pos = timesteps.new_zeros(x.shape[1])
        x = self.dropout(self.decoder.position.embed(x, pos, 0))
        hidden, after = self.decoder.run(x, pos, where, states=layers)
        return self.head.action(hidden[:, -1]), TrajectoryState(after, length, self.decoder.owner)

    def _check(self, timesteps: Tensor, least: int = 0, **values: Tensor) -> None:
        if timesteps.dim() != 2 or timesteps.is_floating_point():
            raise InputError(
                f"timesteps: expected integers [batch, steps], got {timesteps.dtype} {tuple(timesteps.shape)}"
            )
        sizes = {
            "states": self.config.head.state_size,
            "actions": self.config.head.action_size,
            "returns_to_go": 1,
        }
        for name, tensor in values.items():
            if tensor.shape != (*timesteps.shape, size := sizes[name]):
                raise InputError(
                    f"{name}: expected [batch, steps, {size}] {(*timesteps.shape, size)}, "
                    f"got {tuple(tensor.shape)}"
                )
        if (known := bounds(timesteps)) is not None:
            low, high = known
            if low < least or high >= self.config.max_timesteps:
                raise InputError(
                    f"timesteps: expected {least} to {self.config.max_timesteps - 1} (max_timesteps), "
                    f"got {low} to {high}"
                )


def squared_error(predicted: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean squared error over all numbers [B, T, A] of real steps."""
    if labels.shape != predicted.shape:
        raise InputError(f"labels: expected actions {tuple(predicted.shape)}, got {tuple(labels.shape)}")
    errors = (predicted - labels).square().mean(-1)
    return errors.mean() if valid is None else errors.masked_fill(~valid, 0).sum() / valid.sum().clamp_min(1)
