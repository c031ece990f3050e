"""Options of attention that are separate parts: latents, an indexer, a second attention, global tokens."""

import dataclasses
from typing import ClassVar, Literal

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Or, PerHead
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.global_base import GlobalKeys, GlobalPattern
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.norms import LayerNormConfig, NormConfig, RMSNormConfig
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig(Config):
    """Sizes of multi-head latent attention, by default as in DeepSeek-V2 for heads of D channels.

    `form`: how queries read the latents; by default the form with fewer products (stack/latent.py).
    """

    made_by_options: ClassVar[bool] = True

    size: PositiveInt | None = None  # of the latent of keys and values; by default 4 D
    query_size: PositiveInt | None = None  # of the latent of queries; by default queries have none
    rotary_size: PositiveInt | None = None  # channels of a head with positions; by default D / 2, made even
    value_size: PositiveInt | None = None  # of a head's values; by default D
    norm: NormConfig = RMSNormConfig(eps=1e-6)  # of the latents
    form: Literal["auto", "explicit", "absorbed"] = "auto"

    def __post_init__(self) -> None:
        if not self.norm.tokenwise:
            kind = quote(self.norm.kind)
            raise InputError(f"norm: expected a norm of each token, such as 'rms', got {kind}")

    def check_mechanism(self, mechanism: MechanismConfig) -> None:
        """Raise `InputError` unless latents can replace the projections of a mechanism.

        Of several in turn, mechanisms with separate heads keep their projections.
        """
        for part in getattr(mechanism, "mechanisms", (mechanism,)):
            own = part is not mechanism and part.projected_heads(1, 1, 1).own
            if not isinstance(part, SoftmaxConfig) and not own:
                raise InputError(
                    f"latent: expected the mechanism 'softmax', got {quote(part.kind)}; set latent to null, "
                    "or alternate 'softmax' with mechanisms that have heads of their own (`heads`)"
                )

    def widths(self, head_size: int) -> tuple[int, int, int]:
        """Return the channels of the rotated part, of the latent and of a value, for heads of this width."""
        return (
            self.rotary_size or 2 * max(head_size // 4, 1),  # even, as RoPE rotates pairs
            self.size or 4 * head_size,
            self.value_size or head_size,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig(Config):
    """An indexer: small heads that choose the `top_k` keys of each query (stack/indexed.py).

    `stage`: a model is first trained in the stage 'dense', where queries see all keys while the indexer
    learns, then in the stage 'sparse'. `align`: the weight of the indexer's loss in training.
    """

    made_by_options: ClassVar[bool] = True

    top_k: PositiveInt = 2048
    heads: PositiveInt = 4
    size: PositiveInt | None = None  # of the indexer's vectors; by default the width of a head
    norm: NormConfig = LayerNormConfig(eps=1e-6)  # of the indexer's keys
    stage: Literal["dense", "sparse"] = "sparse"
    align: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        if not self.norm.tokenwise:
            kind = quote(self.norm.kind)
            raise InputError(f"norm: expected a norm of each token, such as 'layer', got {kind}")

    def width(self, head_size: int, rotated: int) -> int:
        """Return the width of the indexer's vectors next to heads of `head_size`, `rotated` by positions.

        Raises `InputError` if it is less than the rotated channels.
        """
        width = self.size or max(head_size, rotated)
        if width < rotated:
            raise InputError(
                f"indexer.size: expected at least the {rotated} channels that positions rotate, got {width}"
            )
        return width


Scales = tuple[PositiveFloat, PositiveFloat]
"""Factors of the first attention of a layer and of the one beside it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BesideConfig(Config):
    """A second attention of each layer with the same heads; the layer adds both outputs."""

    second: MechanismConfig = SoftmaxConfig()
    bias: bool = False  # of all four projections
    input_scales: Scales = (1.0, 1.0)
    output_scales: Scales = (1.0, 1.0)

    def check_next_to(self, mechanism: MechanismConfig) -> None:
        """Raise `InputError` for a first mechanism with keys, and for a second that can do less."""
        # What reads a cache of keys finds the first mechanism and refuses it.
        if mechanism.supports_recurrence:
            raise InputError(
                f"beside: expected a recurrence such as 'ssd' as the mechanism next to it, got "
                f"{quote(mechanism.kind)}; exchange the two"
            )
        for ability in ("causal", "supports_packing", "supports_kv_cache"):
            if getattr(mechanism, ability):
                self.second.require(ability)


def split_global_tokens(pattern: Pattern | None) -> tuple[Pattern | None, tuple[GlobalPattern, ...]]:
    """Return the pattern of ordinary queries, and the patterns of global tokens in a union of `pattern`.

    Raises `InputError` if heads have different global tokens.
    """
    if isinstance(pattern, GlobalPattern):
        return GlobalKeys(pattern), (pattern,)
    if isinstance(pattern, Or):
        (left, some), (right, more) = split_global_tokens(pattern.left), split_global_tokens(pattern.right)
        assert left is not None
        assert right is not None
        return left | right, tuple(dict.fromkeys((*some, *more)))
    if isinstance(pattern, PerHead):
        heads = [split_global_tokens(head) for head in pattern.patterns]
        if len({frozenset(tokens) for _, tokens in heads}) > 1:
            raise InputError("global_projections: expected the same global tokens for all heads")
        return PerHead(tuple(ordinary for ordinary, _ in heads if ordinary is not None)), heads[0][1]
    return pattern, ()


def check_global(mechanism: object) -> None:
    """Raise `InputError` unless the mechanism has global tokens to project."""
    if not isinstance(mechanism, SoftmaxConfig):
        raise InputError(
            "global_projections: expected the mechanism 'softmax', whose patterns name the tokens"
        )
    if mechanism.changes_scores:
        raise InputError("global_projections: expected softmax attention without soft_cap and sink")
    if not split_global_tokens(mechanism.for_layer(0).pattern)[1]:
        text = "none" if mechanism.pattern is None else mechanism.pattern.to_text()
        raise InputError(
            f"global_projections: expected a pattern with `| Global(n)` or `| Marked()`, got {text}; "
            "add one, or set global_projections to false"
        )
