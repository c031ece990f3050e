"""The configuration of early exits, and what is kept of their calibration."""

import dataclasses
import math
from typing import ClassVar, Literal

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.depth.base import DepthConfig
from polyformer.depth.exits.base import ExitRuleConfig
from polyformer.depth.exits.exits import Exits
from polyformer.depth.exits.rules import ClassifierConfig
from polyformer.ops.norms import NormConfig
from polyformer.position import Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationConfig(Config):
    """What a threshold promises: with probability `confidence` over the texts that it was found with, the
    expected loss of quality is at most `risk`.

    measure: of what. texts: how many it was found with. layers: how many layers a token then took on average.
    """

    risk: float
    confidence: float
    measure: str
    texts: int
    layers: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitsConfig(DepthConfig):
    """Tokens leave a decoder after one of `layers`, counted from 1; by default after any but the last."""

    layers: tuple[int, ...] | None = None
    rule: ExitRuleConfig = ClassifierConfig()
    threshold: float | tuple[float, ...] = 1.0  # of the rule's confidence; or one for each exit
    decay: float | None = None  # how fast the threshold falls with the position; None for not at all
    decay_length: int = 512  # the longest text, in tokens, by which positions are divided
    translation: Literal["none", "linear"] = "none"  # of an exit's states, before its norm
    training: Literal["aligned", "mixed"] = "aligned"
    loss_weights: Literal["layer", "equal"] = "layer"  # of the exits: by number of the layer, or all alike
    rule_loss: float = 1.0
    alone: bool = False  # of the model, only exits and rule are trained
    calibration: CalibrationConfig | None = dataclasses.field(default=None, compare=False)

    kind: ClassVar[str] = "exits"
    paper: ClassVar[str] = "Elbayad et al. 2020 (Depth-Adaptive Transformer); Schuster et al. 2022 (CALM)"
    encoder: ClassVar[bool] = False
    eager: ClassVar[str] = "which tokens go on depends on computed numbers"

    def __post_init__(self) -> None:
        layers = self.layers
        if layers is not None and (not layers or list(layers) != sorted({*layers}) or layers[0] < 1):
            raise InputError(f"layers: expected rising numbers of layers, from 1 on, got {list(layers)}")
        for name, values in (
            ("translation", ("none", "linear")),
            ("training", ("aligned", "mixed")),
            ("loss_weights", ("layer", "equal")),
        ):
            if getattr(self, name) not in values:
                raise InputError(
                    f"{name}: expected {' or '.join(map(quote, values))}, got {quote(getattr(self, name))}"
                )
        for threshold in self.threshold if isinstance(self.threshold, tuple) else (self.threshold,):
            if not 0.0 <= threshold <= 1.0:
                raise InputError(f"threshold: expected a confidence from 0 to 1, got {threshold}")
        if isinstance(self.threshold, tuple) and layers is not None and len(self.threshold) != len(layers):
            raise InputError(
                f"threshold: expected one number, or one for each of the {len(layers)} exits, "
                f"got {len(self.threshold)}"
            )
        if self.decay is not None and not 0.0 <= self.decay < math.inf:
            raise InputError(f"decay: expected a number of 0 or more, got {self.decay}")
        if self.decay_length < 1:
            raise InputError(f"decay_length: counts tokens, expected 1 or more, got {self.decay_length}")
        if not 0.0 <= self.rule_loss < math.inf:
            raise InputError(f"rule_loss: expected a weight of 0 or more, got {self.rule_loss}")

    @classmethod
    def examples(cls) -> tuple["ExitsConfig", ...]:
        """Rules with and without weights, both ways of training, a falling threshold, linear translations."""
        return (
            cls(threshold=0.5, translation="linear"),
            cls(threshold=0.2, decay=4.0, rule=ExitRuleConfig.from_dict("softmax", "rule")),
            cls(threshold=0.9, training="mixed", rule=ExitRuleConfig.from_dict("saturation", "rule")),
            cls(threshold=0.5, loss_weights="equal", rule=ExitRuleConfig.from_dict("multinomial", "rule")),
        )

    def build(self, shape: Shape, norm: NormConfig | None) -> Exits:
        """A norm for each exit where the stack ends in one, a translation where asked for, and the rule."""
        layers = tuple(range(1, shape.num_layers)) if self.layers is None else self.layers
        if layers and layers[-1] >= shape.num_layers:
            raise InputError(
                f"depth.layers: expected layers below the last, {shape.num_layers}, got {list(layers)}"
            )
        thresholds = self.threshold if isinstance(self.threshold, tuple) else (self.threshold,) * len(layers)
        if len(thresholds) != len(layers):
            raise InputError(
                f"depth.threshold: expected one number, or one for each of the {len(layers)} exits, "
                f"got {len(thresholds)}"
            )
        exits = Exits(
            shape.hidden_size,
            [*layers, shape.num_layers],
            norm,
            self.rule.build(shape.hidden_size, len(layers) + 1),
            linear=self.translation == "linear",
        )
        exits.thresholds = thresholds
        exits.decay = None if self.decay is None else (self.decay, self.decay_length)
        exits.mixed = self.training == "mixed"
        exits.by_layer = self.loss_weights == "layer"
        exits.rule_loss = self.rule_loss
        exits.alone = self.alone
        return exits
