"""The configuration of a stack: the parts of its layers, and which of them go together."""

import dataclasses
import json
from typing import Annotated, Any

from annotated_types import Interval

from polyformer.attention.patterns.between_sequences import check_within_sequence
from polyformer.attention.positions import PositionConfig, SinusoidalConfig
from polyformer.core.config import Config, encode
from polyformer.core.errors import InputError, quote
from polyformer.core.limits import LAYERS
from polyformer.core.ops.norms import LayerNormConfig, NormConfig
from polyformer.core.ranges import Probability
from polyformer.nn.block import BlockConfig, PostNormConfig
from polyformer.nn.depth import DepthConfig, FixedConfig
from polyformer.nn.feedforward import DenseConfig, FeedForwardConfig, NoFeedForwardConfig
from polyformer.nn.memory import MemoryConfig, NoMemoryConfig
from polyformer.nn.stack.attention_config import AttentionConfig
from polyformer.nn.stack.convolution import ConvolutionConfig
from polyformer.nn.stack.groups import check_groups, shared_layers

STATELESS = {"dropout", "form"}
"""Options of attention with which no state differs: two models may continue from each other's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackConfig(Config):
    """The parts of every layer of a stack, and the number of layers."""

    num_hidden_layers: Annotated[int, Interval(ge=1, le=LAYERS)] = 6
    num_hidden_groups: int | None = None  # groups of layers that share weights (ALBERT); by default none
    layers_per_group: int = 1  # layers of a group, which run in turn until the next group
    attention: AttentionConfig = AttentionConfig()
    feedforward: FeedForwardConfig = DenseConfig()
    position: PositionConfig = SinusoidalConfig()
    block: BlockConfig = PostNormConfig()
    norm: NormConfig = LayerNormConfig()
    memory: MemoryConfig = NoMemoryConfig()
    depth: DepthConfig = FixedConfig()
    dropout: Probability = 0.1  # of sub-layer outputs and of the embedding sum
    final_norm: bool = True  # of the output, if the block does not norm the residual stream
    final_dropout: Probability = 0.0  # of the output, after the final norm (T5)
    convolution: ConvolutionConfig | None = None  # parallel to an encoder's first layer (DeBERTa v2)
    layerdrop: Probability = 0.0  # probability that training skips a layer (Fan et al. 2020, LayerDrop)

    def __post_init__(self) -> None:
        sharing = self.num_hidden_layers, self.num_hidden_groups, self.layers_per_group
        check_groups(*sharing, (self.attention.mechanism, self.feedforward))
        if self.attention.global_projections and not isinstance(self.memory, NoMemoryConfig):
            raise InputError(
                "memory: global_projections need the whole text, which a memory does not keep; "
                "use only one of them"
            )
        if self.block.reversible and not self.memory.reversible:
            raise InputError(
                f"memory: {quote(self.memory.kind)} is trained in the forward pass, which a reversible stack "
                "runs twice; use 'recurrent', or another block"
            )
        if self.layerdrop and self.block.reversible:
            raise InputError("layerdrop: a reversible stack cannot skip layers; set it to 0")
        if self.convolution is not None and (not self.block.normalizes_output or self.layerdrop):
            raise InputError("convolution: expected the block 'post' and layerdrop 0, as in DeBERTa")
        check_within_sequence(self.attention, "attention")
        self._check_value_residual()
        self._check_feedforward()
        self._check_depth()
        self._check_norm()

    def _check_value_residual(self) -> None:
        """Raise `InputError` for parts that compute a layer without the first layer's values."""
        others = {
            "num_hidden_groups": len(set(self.shared_layers)) < self.num_hidden_layers,
            "block": self.block.reversible,
            "memory": not isinstance(self.memory, NoMemoryConfig),
        }
        for name, present in others.items():
            if present and self.attention.value_residual:
                raise InputError(
                    f"value_residual: expected false with {name} as configured, got true: its layers run "
                    "without the first layer's values of the same call"
                )

    def _check_feedforward(self) -> None:
        """Raise `InputError` for a feed-forward that a reversible stack cannot have."""
        parts = [self.feedforward.for_layer(layer) for layer in range(self.num_hidden_layers)]
        if self.block.reversible and any(isinstance(part, NoFeedForwardConfig) for part in parts):
            raise InputError("feedforward: a reversible layer has two sub-layers, got 'none'; use 'dense'")
        remembers = not isinstance(self.memory, NoMemoryConfig)
        if self.block.reversible and remembers and any(part.stateful for part in parts):
            raise InputError(
                f"feedforward: {quote(self.feedforward.kind)} has a state of earlier tokens, which a "
                "reversible stack with a memory does not keep; use 'dense', or another block"
            )

    def _check_depth(self) -> None:
        """Raise `InputError` for parts that need all tokens in every layer, if the depth is adaptive."""
        if isinstance(self.depth, FixedConfig):
            return
        others = {
            "block": self.block.reversible,
            "layerdrop": self.layerdrop > 0,
            "convolution": self.convolution is not None,
        }
        for name, present in others.items():
            if present:
                raise InputError(
                    f"depth: {quote(self.depth.kind)} lets tokens skip layers, but {name} as configured "
                    "needs all tokens in every layer; use only one of them"
                )

    def _check_norm(self) -> None:
        """Raise `InputError` for parts that norm some tokens twice or never, if the norm uses all."""
        others = {
            "block": self.block.reversible,
            "memory": not isinstance(self.memory, NoMemoryConfig),
            "depth": not isinstance(self.depth, FixedConfig),
        }
        for name, present in others.items():
            if present and not self.norm.tokenwise:
                raise InputError(
                    f"norm: {quote(self.norm.kind)} computes statistics over all tokens, each once, but "
                    f"{name} {quote(getattr(self, name).kind)} normalizes some twice or never; use 'layer'"
                )

    def owner(self, hidden_size: int, has_cross: bool) -> tuple[str, ...]:
        """Return the parts, as text, that a stack must share with the one whose states it continues from.

        Options with their default values, and options that change no state, are left out, so that an option
        that a later version adds changes no text.
        """
        parts = {name: getattr(self, name) for name in ("attention", "position", "memory")}
        texts = [f"{name} {json.dumps(_chosen(part))}" for name, part in parts.items()]
        own = _chosen(self.feedforward) if self.feedforward.stateful else "without a state"
        cross = "cross-attention" if has_cross else "no cross-attention"
        counts = f"{self.num_hidden_layers} layers", f"width {hidden_size}"
        return *counts, cross, *texts, f"feedforward {json.dumps(own)}"

    @property
    def has_features(self) -> bool:
        """Whether the stack has parts that only a `FeatureStack` runs."""
        kept = isinstance(self.memory, NoMemoryConfig) and isinstance(self.depth, FixedConfig)
        wiring = self.block.reversible or self.block.exceeds_float16 or self.attention.value_residual
        return not kept or wiring or self.convolution is not None or self.layerdrop > 0

    @property
    def shared_layers(self) -> list[int]:
        """Return for each layer the index of its weights among all distinct layers."""
        return shared_layers(self.num_hidden_layers, self.num_hidden_groups, self.layers_per_group)


def _chosen(config: Config) -> dict[str, Any]:
    """Return the kind, and the options that differ from their defaults and have an effect on states."""
    options = {}
    for field in dataclasses.fields(config):
        value, default = (_plain(x) for x in (getattr(config, field.name), field.default))
        if value != default and field.name not in STATELESS:
            options[field.name] = value
    return {"kind": config.kind, **options} if config.kind else options


def _plain(value: Any) -> Any:
    return _chosen(value) if isinstance(value, Config) else encode(value)
