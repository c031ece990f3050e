"""Options of attention that are separate parts: latents, and a second attention in each layer."""

import dataclasses
from typing import Literal

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.norms import NormConfig, RMSNormConfig
from polyformer.core.ranges import PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig(Config):
    """Sizes of multi-head latent attention, by default as in DeepSeek-V2 for heads of D channels.

    `form`: how queries read the latents; by default the form with fewer products (stack/latent.py).
    """

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

    def widths(self, head_size: int) -> tuple[int, int, int]:
        """Return the channels of the rotated part, of the latent and of a value, for heads of this width."""
        return (
            self.rotary_size or 2 * max(head_size // 4, 1),  # even, as RoPE rotates pairs
            self.size or 4 * head_size,
            self.value_size or head_size,
        )


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
