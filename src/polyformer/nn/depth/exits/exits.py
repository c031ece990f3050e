"""The exits of a stack, and the decisions at them during a call."""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from polyformer.attention.positions import Shape
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import NormConfig
from polyformer.core.ranges import NonNegativeFloat, PositiveInt, UnitFloat
from polyformer.nn.depth.base import (
    Active,
    Depth,
    DepthConfig,
    DepthInput,
    ExitLoss,
    Halting,
    is_full_depth,
    state_records,
)
from polyformer.nn.depth.exits.rules import Candidates, ClassifierConfig, ExitRuleConfig, ExitTrajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationConfig(Config):
    """The guarantee of a threshold: with probability `confidence` over the calibration texts, the expected
    loss of quality is at most `risk`.

    measure: of the quality. texts: number of calibration texts. layers: mean number of layers of a token with
    this threshold.
    """

    risk: float
    confidence: float
    measure: str
    texts: int
    layers: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitsConfig(DepthConfig):
    """Early exits: a token can leave the decoder before the last layer.

    Tokens leave a decoder after one of `layers`, counted from 1; by default after any layer except the last.
    """

    layers: tuple[PositiveInt, ...] | None = None
    rule: ExitRuleConfig = ClassifierConfig()
    threshold: UnitFloat | tuple[UnitFloat, ...] = 1.0  # of the rule's confidence; or a number for each exit
    decay: NonNegativeFloat | None = None  # rate of decrease with the position; None for a constant threshold
    decay_length: PositiveInt = 512  # the longest text in tokens, the divisor of positions
    translation: Literal["none", "linear"] = "none"  # of an exit's states, before its norm
    training: Literal["aligned", "mixed"] = "aligned"
    loss_weights: Literal["layer", "equal"] = "layer"  # of the exits: the number of the layer, or all equal
    rule_loss: NonNegativeFloat = 1.0
    alone: bool = False  # train only exits and rule, not the rest of the model
    calibration: CalibrationConfig | None = dataclasses.field(default=None, compare=False)

    kind: ClassVar[str] = "exits"
    paper: ClassVar[str] = "Elbayad et al. 2020 (Depth-Adaptive Transformer); Schuster et al. 2022 (CALM)"
    encoder: ClassVar[bool] = False
    eager: ClassVar[str] = "which tokens go on depends on computed numbers"

    def __post_init__(self) -> None:
        layers = self.layers
        if layers is not None and (not layers or list(layers) != sorted({*layers})):
            raise InputError(f"layers: expected increasing layer numbers, got {list(layers)}")
        if isinstance(self.threshold, tuple) and layers is not None and len(self.threshold) != len(layers):
            raise InputError(
                f"threshold: expected one number, or one for each of the {len(layers)} exits, "
                f"got {len(self.threshold)}"
            )

    @classmethod
    def examples(cls) -> tuple["ExitsConfig", ...]:
        return (
            cls(threshold=0.5, translation="linear"),
            cls(threshold=0.2, decay=4.0, rule=ExitRuleConfig.from_dict("softmax", "rule")),
            cls(threshold=0.9, training="mixed", rule=ExitRuleConfig.from_dict("saturation", "rule")),
            cls(threshold=0.5, loss_weights="equal", rule=ExitRuleConfig.from_dict("multinomial", "rule")),
        )

    def build(self, shape: Shape, norm: NormConfig | None) -> "Exits":
        """Return rule and exits; exits have a norm if the stack has a final norm."""
        layers = tuple(range(1, shape.num_layers)) if self.layers is None else self.layers
        if layers and layers[-1] >= shape.num_layers:
            raise InputError(
                f"depth.layers: expected layers below the last, {shape.num_layers}, got {list(layers)}"
            )
        if isinstance(self.threshold, tuple) and len(self.threshold) != len(layers):
            raise InputError(
                f"depth.threshold: expected one number, or one for each of the {len(layers)} exits, "
                f"got {len(self.threshold)}"
            )
        return Exits(self, shape.hidden_size, (*layers, shape.num_layers), norm)


class Exit(nn.Module):
    """The head's input for a state h [..., E]: norm(h), or norm(h + A h)."""

    def __init__(self, hidden_size: int, norm: NormConfig | None, linear: bool):
        super().__init__()
        self.map = Linear(hidden_size, hidden_size) if linear else None
        self.norm = nn.Identity() if norm is None else norm.build(hidden_size)

    def forward(self, h: Tensor) -> Tensor:
        """Return a tensor of the shape of h."""
        return self.norm(h if self.map is None else h + self.map(h))


class Exits(Depth):
    """The exits after `layers`; the last is the end of the stack and has no separate module."""

    def __init__(self, config: ExitsConfig, hidden_size: int, layers: Sequence[int], norm: NormConfig | None):
        super().__init__()
        self.config, self.layers, self.trains_only_depth = config, list(layers), config.alone
        linear, count = config.translation == "linear", len(layers) - 1
        self.exits = nn.ModuleList(Exit(hidden_size, norm, linear) for _ in range(count))
        self.rule = config.rule.build(hidden_size, len(layers))
        self.reads_source = self.rule.reads_source
        threshold = config.threshold
        self.thresholds = list(threshold) if isinstance(threshold, tuple) else [threshold] * count

    def init_added(self, final_norm: nn.Module) -> None:
        """Initialize exits that are added to a trained model as copies of its final norm."""
        with torch.no_grad():
            for exit in self.exits:
                assert isinstance(exit, Exit)
                # With the final norm and a zero map, exit n computes finish(h_n), as the end of the stack.
                exit.norm = copy.deepcopy(final_norm)
                if exit.map is not None:
                    exit.map.weight.zero_()

    def start(self, inputs: DepthInput) -> "ExitHalting":
        """Return the decisions of a new call, in which no token has left."""
        return ExitHalting(self, inputs)

    def threshold(self, number: int, pos: Tensor) -> Tensor:
        """Return lambda'(t) of exit `number` at the positions [...], in their shape."""
        start = torch.full(pos.shape, self.thresholds[number], device=pos.device)
        if self.config.decay is None:
            return start
        # The threshold falls with the position t: an error in an early token affects more of the text.
        falling = torch.exp(-self.config.decay * pos / self.config.decay_length)
        return (0.9 * start + 0.1 * falling).clamp(0, 1)

    def weight(self, number: int) -> float:
        """Return the weight of the loss at exit `number`; the sum of all is 1."""
        # With 'layer', the weight of an exit is proportional to its layer number.
        own = self.layers if self.config.loss_weights == "layer" else [1] * len(self.layers)
        return own[number] / sum(own)


class ExitHalting(Halting):
    """The halting decisions of a call: which tokens have exited, and with which input of the head.

    exited: [B, T] bool, None before the first exit. hidden: [B, T, E], the head's input of exited tokens.
    final_hidden: [B, T, E], the head's input of all others. features: of the rule for each token, [B, T, X],
    or for each source, [B, X]. sampled_exits: [B, T], the exit of each token in `mixed` training.
    """

    def __init__(self, exits: Exits, inputs: DepthInput):
        super().__init__(inputs)
        self.exits = exits
        self.exited: Tensor | None = None
        self.hidden = self.final_hidden = inputs.x
        self.features: Tensor | None = None
        if inputs.source is not None:
            self.features = exits.rule.source_features(inputs.source, inputs.source_valid)
        mixed = exits.config.training == "mixed"
        self.aligned = exits.training and not mixed
        self.states: list[Tensor] = []
        records = state_records()
        self.recorded = records is not None
        if records is not None:
            records.append(self.states)
        self.sampled_exits: Tensor | None = None
        if exits.training and mixed:
            self.sampled_exits = torch.randint(len(exits.layers), inputs.x.shape[:2], device=inputs.x.device)

    def select_halted(self, layer: int, x: Tensor, active: Active) -> Tensor | None:
        """Return the tokens that leave after this layer; none at the end."""
        if not layer and self.features is None:
            self.features = self.exits.rule.token_features(x)
        # `layers` count from 1, the index of a layer from 0.
        if layer + 1 not in self.exits.layers:
            return None
        number = self.exits.layers.index(layer + 1)
        # Aligned training and recordings run all layers and read the states afterwards.
        if self.aligned or self.recorded:
            self.states.append(x)
            return None
        if number == len(self.exits.exits) or (is_full_depth() and self.sampled_exits is None):
            return None
        state = active.gather(x)
        hidden = self.exits.exits[number](state)
        exits_now = self._exits_now(number, active, state, active.gather(self.previous), hidden)
        if not exits_now.is_meta and bool(exits_now.any()):
            exiting = Active(active.mask, active.index[exits_now])
            self.hidden = exiting.scatter(hidden[:, exits_now], self.hidden)
            exited = torch.zeros_like(active.mask) if self.exited is None else self.exited
            self.exited = exited.flatten().index_fill(0, exiting.index, True).view(exited.shape)
        return exits_now

    def _exits_now(
        self, number: int, active: Active, state: Tensor, previous: Tensor, hidden: Tensor
    ) -> Tensor:
        """Return which of the active tokens leave at exit `number`, [N] bool."""
        if self.sampled_exits is not None:
            return self.sampled_exits.flatten()[active.index] == number
        rows, length = self.depths.shape
        features = self.features
        if features is not None:
            # [B, X] of a source is the same for all of its tokens.
            features = features if features.dim() == 3 else features.unsqueeze(1).expand(-1, length, -1)
            features = features.flatten(0, 1)[active.index]
        # The rule sees only active tokens: all tensors are [1, N, ...] or [N, ...].
        candidates = Candidates(number, state, previous, hidden, self.inputs.predict, features)
        pos = self.inputs.pos.expand(rows, length).flatten()[active.index]
        return self.exits.rule.confidence(candidates) >= self.exits.threshold(number, pos)

    def output(self, x: Tensor, finish: Callable[[Tensor], Tensor]) -> Tensor:
        """Return for each token the head's input from its exit."""
        self.final_hidden = y = super().output(x, finish)
        return (
            y if self.exited is None else torch.where(self.exited.unsqueeze(-1), self.hidden.to(y.dtype), y)
        )

    def losses(self, loss: Tensor, exit_loss: ExitLoss) -> dict[str, Tensor]:
        """Return, for aligned training, the additional loss of the other exits and the loss of the rule."""
        if not self.aligned or not self.exits.exits:
            return {}
        hidden = [exit(state) for exit, state in zip(self.exits.exits, self.states)]
        # The last exit is the end of the stack; its loss is `loss`.
        mean = self.exits.weight(len(hidden)) * loss
        for number, seen in enumerate(hidden):
            mean = mean + self.exits.weight(number) * exit_loss.loss(seen)
        features = (
            self.features if self.features is None or self.features.dim() == 3 else self.features.unsqueeze(1)
        )
        trajectory = ExitTrajectory(self.states, [*hidden, self.final_hidden], exit_loss, features)
        # The caller adds the terms to `loss`, so the sum is the weighted mean of all exits.
        terms = {"exits": mean - loss}
        rule = self.exits.rule.loss(trajectory)
        if rule is not None:
            terms["exit_rule"] = self.exits.config.rule_loss * rule
        return terms


def set_threshold(model: nn.Module, threshold: float | Sequence[float]) -> None:
    """Set the threshold of every stack of `model` with exits, or a threshold for each exit.

    Raises `InputError` if there are no exits, or another number of them.
    """
    stacks = [module for module in model.modules() if isinstance(module, Exits)]
    if not stacks:
        raise InputError(
            "threshold: this model has no exits; add them with `polyformer convert --depth exits`"
        )
    for exits in stacks:
        count = len(exits.exits)
        values = [threshold] * count if isinstance(threshold, (int, float)) else list(threshold)
        if len(values) != count or not all(0.0 <= value <= 1.0 and math.isfinite(value) for value in values):
            raise InputError(
                f"threshold: expected a confidence from 0 to 1, or one for each of the {count} exits, "
                f"got {threshold}"
            )
        exits.thresholds = values
