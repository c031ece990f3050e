"""A policy: maps observations and a memory of the episode to the logits of actions and a value.

    x_t = ReLU(W o_t + b)        h_t = trunk(x_t, memory of the episode's steps before t)
    policy(a | o_1 ... o_t) = softmax(W_a h_t + b_a)_a        value(o_1 ... o_t) = W_v h_t + b_v

Continuous actions are vectors from normal(W_a h_t + b_a, exp(s)), with deviations s that do not depend on the
observations (Schulman et al. 2015); -1 and 1 are the environment's bounds.

With a trunk of gated decoder layers this is GTrXL (Parisotto et al. 2019, section 3); with layers of the
block `post` it is the Transformer-XL that the paper compares with. The state is passed in and returned: see
`polyformer.models.architectures.policy_trunks`.
"""

import contextlib
import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from polyformer.core.errors import InputError
from polyformer.core.initialization import initialize
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.softmax import recorded
from polyformer.core.ranges import PositiveInt, UnitFloat, check_sizes
from polyformer.core.state import State
from polyformer.models.architectures.policy_trunks import DecoderTrunkConfig, Trunk, TrunkConfig
from polyformer.models.architectures.pretrained import PretrainedMixin
from polyformer.models.plugins import ConfigWithImports


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
