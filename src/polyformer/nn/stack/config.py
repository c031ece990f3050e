"""The configuration of a stack: its layers, their attention, and which layers share weights."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Interval

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.between_sequences import check_within_sequence
from polyformer.attention.positions import Position, PositionConfig, SinusoidalConfig
from polyformer.core.config import Config, encode
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.ops.norms import LayerNormConfig, NormConfig
from polyformer.core.ranges import LAYERS, PositiveInt, Probability
from polyformer.nn.block import BlockConfig, PostNormConfig
from polyformer.nn.depth import DepthConfig, FixedConfig
from polyformer.nn.feedforward import DenseConfig, FeedForwardConfig, NoFeedForwardConfig
from polyformer.nn.memory import MemoryConfig, NoMemoryConfig
from polyformer.nn.stack.attention_options import BesideConfig, IndexerConfig, LatentConfig, check_global
from polyformer.nn.stack.convolution import ConvolutionConfig


def shared_layers(layers: int, groups: int | None, size: int) -> list[int]:
    """Return for each of `layers` layers the index of its weights among all distinct layers.

    There are `groups` groups of `size` layers. A group runs its layers in turn, repeatedly, until the next
    group begins. Without groups every layer has separate weights.
    """
    if groups is None:
        return list(range(layers))
    runs = layers // size
    return [run * groups // runs * size + place for run in range(runs) for place in range(size)]


def check_groups(layers: int, groups: int | None, size: int, parts: Sequence[Any]) -> None:
    """Raise `InputError` for impossible groups, and for `parts` that differ in layers of the same weights."""
    if size < 1 or layers % size or (groups is None and size > 1):
        raise InputError(
            f"layers_per_group: expected a divisor of the {layers} layers, and 1 without num_hidden_groups, "
            f"got {size}"
        )
    most = layers // size
    if groups is not None and not 1 <= groups <= most:
        raise InputError(f"num_hidden_groups: expected 1 to {most} layers, or None, got {groups}")
    shared = shared_layers(layers, groups, size)
    for layer, number in enumerate(shared):
        first = shared.index(number)
        for part in parts:
            if part.for_layer(layer) != part.for_layer(first):
                raise InputError(
                    f"num_hidden_groups: layers {first} and {layer} share weights, and {quote(part.kind)} "
                    f"differs between layers; use the same in all layers"
                )


PROJECTIONS = ("query", "key", "value", "output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """The heads and projections of attention, and its mechanism."""

    num_attention_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt | None = None  # by default the number of query heads
    head_size: PositiveInt | None = None  # by default hidden_size / num_attention_heads
    bias: bool | tuple[str, ...] = True  # of all four projections, or of the named ones
    mechanism: MechanismConfig = SoftmaxConfig()
    global_projections: bool = False  # separate projections of global tokens (stack/global_projections)
    qk_norm: NormConfig | None = None  # of queries and keys, before positions
    qk_norm_of: Literal["head", "projection"] = "head"  # the vectors that `qk_norm` normalizes
    output_gate: bool = False  # of heads, sigmoid(x W_g); mechanisms with an output gate keep theirs
    head_scale: bool = False  # a learned factor of each head (stack/feature_attention.py)
    value_residual: bool = False  # sums with the values of the first layer (stack/multihead.py)
    latent: LatentConfig | None = None  # keys and values from one latent per token (stack/latent.py)
    indexer: IndexerConfig | None = None  # small heads that choose the keys of a query (stack/indexed.py)
    beside: BesideConfig | None = None  # a second attention; both outputs are added

    def __post_init__(self) -> None:
        heads = self.num_attention_heads
        if heads % self.kv_heads:
            raise InputError(
                f"num_key_value_heads: expected a divisor of the {heads} query heads, got {self.kv_heads}"
            )
        if self.mechanism.shares_queries and self.kv_heads != heads:
            raise InputError(
                f"num_key_value_heads: keys of {quote(self.mechanism.kind)} are its queries, "
                f"expected {heads}, got {self.kv_heads}"
            )
        for option, count in (("num_attention_heads", heads), ("num_key_value_heads", self.kv_heads)):
            if count % self.mechanism.head_multiple:
                kind, multiple = quote(self.mechanism.kind), self.mechanism.head_multiple
                raise InputError(f"{option}: {kind} needs a multiple of {multiple}, got {count}")
        if self.global_projections:
            check_global(self.mechanism)
            if self.value_residual:
                raise InputError("value_residual: expected false with global_projections, got true")
        self._check_qk_norm()
        self._check_latent()
        self._check_indexer()
        self._check_beside()
        for name in () if isinstance(self.bias, bool) else self.bias:
            if name not in PROJECTIONS:
                raise unknown("bias", name, PROJECTIONS)

    def _check_qk_norm(self) -> None:
        """Raise `InputError` for a norm of queries and keys that has no definition here."""
        if self.qk_norm is None:
            return
        kind = quote(self.qk_norm.kind)
        if not self.qk_norm.tokenwise:
            raise InputError(f"qk_norm: expected a norm of each token, such as 'rms', got {kind}")
        if self.mechanism.shares_queries:
            raise InputError(
                f"qk_norm: keys of {quote(self.mechanism.kind)} are its queries, expected null, got {kind}"
            )
        if self.global_projections:
            raise InputError(f"qk_norm: expected null with global_projections, got {kind}")

    def _check_latent(self) -> None:
        """Raise `InputError` for options that latent attention does not have."""
        if self.latent is None:
            return
        self.latent.check_mechanism(self.mechanism)
        if self.kv_heads != self.num_attention_heads:
            raise InputError(
                f"num_key_value_heads: every query head has its own projection of the latent, expected "
                f"{self.num_attention_heads} or null, got {self.kv_heads}"
            )
        others = {
            "qk_norm": self.qk_norm is not None,
            "global_projections": self.global_projections,
            "output_gate": self.output_gate,
            "head_scale": self.head_scale,
            "value_residual": self.value_residual,
        }
        for name, present in others.items():
            if present:
                raise InputError(f"{name}: latent attention has no such projections; use only one of them")
        if not isinstance(self.bias, bool) and "value" in self.bias:
            raise InputError("bias: latent attention has biases of 'query', 'key' and 'output', got 'value'")

    def _check_indexer(self) -> None:
        """Raise `InputError` for options that attention with an indexer does not have."""
        if self.indexer is None:
            return
        if not isinstance(self.mechanism, SoftmaxConfig):
            kind = quote(self.mechanism.kind)
            raise InputError(f"indexer: expected the mechanism 'softmax', got {kind}; set indexer to null")
        others = {
            "global_projections": self.global_projections,
            "value_residual": self.value_residual,
            "beside": self.beside is not None,
        }
        for name, present in others.items():
            if present:
                raise InputError(
                    f"{name}: attention with an indexer has no such option; use only one of them"
                )

    def _check_beside(self) -> None:
        """Raise `InputError` for options that two kinds of attention in a layer do not have."""
        if self.beside is None:
            return
        others = {
            "global_projections": self.global_projections,
            "value_residual": self.value_residual,
            "latent": self.latent is not None,
        }
        for name, present in others.items():
            if present:
                raise InputError(
                    f"{name}: a layer with attention beside its own has no such option; unset it"
                )
        self.beside.check_next_to(self.mechanism)
        self.beside_config()

    def beside_config(self) -> "AttentionConfig":
        """Return the configuration of the second attention, which has the same heads."""
        assert self.beside is not None
        return dataclasses.replace(
            self, mechanism=self.beside.second, bias=self.beside.bias, beside=None, output_gate=False
        )

    @classmethod
    def expanded(cls, data: object, where: str) -> object:
        """Return a mechanism or a pattern as the configuration of default heads with this mechanism."""
        return data if _is_attention_config(data) else {"mechanism": data}

    @classmethod
    def notations(cls) -> str:
        """Return the accepted forms of an attention configuration, for error messages."""
        return f"{MechanismConfig.notations()}; or a mapping of options such as num_attention_heads"

    def with_value(self, value: object, where: str) -> Config | None:
        """Return the configuration with a new mechanism and the same heads, if `value` is a mechanism."""
        if _is_attention_config(value):
            return super().with_value(value, where)
        mechanism = self.mechanism.with_value(value, where) or MechanismConfig.from_dict(value, where)
        return dataclasses.replace(self, mechanism=mechanism)

    def has_bias(self, projection: str) -> bool:
        """Return whether the projection, one of `PROJECTIONS`, adds a bias."""
        return self.bias if isinstance(self.bias, bool) else projection in self.bias

    @property
    def kv_heads(self) -> int:
        """Return the number of key heads."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    def width(self, hidden_size: int) -> int:
        """Return the head dimension in a model of `hidden_size`."""
        if self.head_size is not None:
            return self.head_size
        if hidden_size % self.num_attention_heads:
            raise InputError(
                f"num_attention_heads: expected a divisor of hidden_size {hidden_size}, "
                f"got {self.num_attention_heads}; or give head_size"
            )
        return hidden_size // self.num_attention_heads

    def rotary_width(self, hidden_size: int) -> int:
        """Return the channels of a head that a position scheme may rotate, its first channels."""
        width = self.width(hidden_size)
        return width if self.latent is None else self.latent.widths(width)[0]

    def has_features(self, layer: int) -> bool:
        """Return whether layer `layer` needs more than plain multi-head attention (`FeatureAttention`)."""
        mechanism = self.mechanism.for_layer(layer)
        parts = self.latent is not None, self.indexer is not None, self.beside is not None
        options = self.global_projections, self.value_residual, self.output_gate, self.head_scale, *parts
        own = mechanism.projected_heads(self.num_attention_heads, self.kv_heads, 1).own
        gates = mechanism.gate_sizes(self.num_attention_heads, 1)
        return any(options) or own or mechanism.shares_queries or bool(gates)

    def has_latent(self, layer: int) -> bool:
        """Return whether layer `layer` has latent attention."""
        return self.latent is not None and isinstance(self.mechanism.for_layer(layer), SoftmaxConfig)

    def can_skip_queries(self, layer: int) -> bool:
        """Return whether layer `layer` can leave out the queries of tokens that halted."""
        return self.mechanism.for_layer(layer).separate_queries and not self.global_projections

    def cross(self, pattern: Pattern | None = None) -> "AttentionConfig":
        """Return the configuration of cross-attention with the same heads.

        pattern: between the two sequences; None for all keys.
        """
        own = dict.fromkeys(("global_projections", "output_gate", "value_residual"), False)
        return dataclasses.replace(
            self, mechanism=self.mechanism.cross(pattern), latent=None, indexer=None, beside=None, **own
        )


def check_position_terms(position: Position, mechanism: MechanismConfig, latent: bool) -> None:
    """Raise `InputError` for a position scheme with terms that attention cannot compute.

    latent: whether keys are projections of latents.
    """
    if position.adds_terms:
        mechanism.require("supports_score_bias")
        if latent and not position.adds_bias:
            raise InputError(
                f"latent: {type(position).__name__} positions compute terms of a head's keys, which are not "
                "kept; use 'rope', or biases by distance such as 'alibi' and 't5'"
            )
    if position.rotates_parts:
        mechanism.require("supports_part_rotations")


def _is_attention_config(data: object) -> bool:
    """Return whether `data` describes the heads too, and not only the mechanism."""
    return isinstance(data, AttentionConfig) or (isinstance(data, dict) and "kind" not in data)


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
        if self.block.stream_copies and self.memory.segments:
            raise InputError(
                f"memory: {quote(self.memory.kind)} keeps the residual stream of each layer, of which block "
                f"{quote(self.block.kind)} has several copies; use 'none' or 'sinks', or another block"
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
        self._check_indexer()
        self._check_beside()

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
            "block": self.block.reversible or self.block.stream_copies > 0,
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
        for name, present in self._unusual(self.block.needs_tokenwise_norm).items():
            if present and not self.norm.tokenwise:
                raise InputError(
                    f"norm: {quote(self.norm.kind)} computes statistics over all tokens, each once, but "
                    f"{name} {quote(getattr(self, name).kind)} normalizes some twice or never; use 'layer'"
                )

    def _check_indexer(self) -> None:
        """Raise `InputError` for parts that read keys of a layer without an indexer's choice of them."""
        for name, present in self._unusual(self.block.reversible).items():
            if present and self.attention.indexer is not None:
                raise InputError(
                    f"{name}: {quote(getattr(self, name).kind)} reads keys of a layer without an indexer's "
                    "choice of them; unset attention.indexer or this option"
                )

    def _unusual(self, block: bool) -> dict[str, bool]:
        """Return which parts run layers in an unusual way: the block as stated, a memory, adaptive depth."""
        memory = not isinstance(self.memory, NoMemoryConfig)
        return {"block": block, "memory": memory, "depth": not isinstance(self.depth, FixedConfig)}

    def _check_beside(self) -> None:
        """Raise `InputError` for parts that run a layer in a way that two kinds of attention do not have."""
        if self.attention.beside is None:
            return
        check_within_sequence(self.attention.beside_config(), "attention.beside")
        for name, usual in (("memory", NoMemoryConfig), ("depth", FixedConfig)):
            part = getattr(self, name)
            if not isinstance(part, usual):
                raise InputError(
                    f"{name}: {quote(part.kind)} reads the keys of a layer, which has two kinds of attention "
                    "side by side; unset attention.beside or this option"
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
        wiring = self.block.has_features or self.attention.value_residual
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
