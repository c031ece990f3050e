"""RoPE: queries and keys are rotated by angles proportional to position, so scores depend on distances.

    q_i . k_j = (R_i q)^T (R_j k) = q^T R_(j-i) k        channels in pairs, pair m rotated by pos * theta_m
    theta_m = base^(-2m / W), m = 0 .. W/2 - 1           the first W = fraction * D channels of each head

`layout` sets the pairs of channels: m and m + W/2 ("halves": GPT-NeoX, Llama), or 2m and 2m + 1 ("pairs": the
paper, GPT-J). Values are not rotated. An `extension` adapts a model trained on short texts to longer texts:
context_extension.py changes the frequencies, length_extension.py rotates sets of pairs further. RoPE has no
parameters and costs a few passes over q and k. The angles are computed in float64, once for all layers with
the same base; ModernBERT has a smaller base in layers with a window, and SmolLM3 layers without rotation.
Su et al. 2021, section 3.2; rotation of a fraction of the channels as in GPT-J and GPT-NeoX. The temperature
of YaRN multiplies the rotated channels, as in its authors' code: if `fraction` is below 1, the other channels
are not scaled.
"""

import dataclasses
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site, angle_dtype
from polyformer.attention.positions.rope.channel_pairs import (
    ChannelPairs,
    Layout,
    RotationInCache,
    key_positions,
    query_positions,
)
from polyformer.attention.positions.rope.context_extension import (
    InterpolationConfig,
    Llama3Config,
    NtkConfig,
    RopeExtensionConfig,
    YarnConfig,
)
from polyformer.attention.positions.rope.length_extension import (
    DynamicNtkConfig,
    LengthExtensionConfig,
    LongRopeConfig,
    Rotation,
    SelfExtendConfig,
    position_range,
)
from polyformer.attention.positions.sink_cache import SinkCache
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import PositiveShare
from polyformer.core.sequence.context import Context

Base = Annotated[float, Gt(1)]
EXTENSIONS = (
    *(InterpolationConfig, NtkConfig, YarnConfig, Llama3Config),
    *(DynamicNtkConfig, LongRopeConfig, SelfExtendConfig),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig(PositionConfig):
    """Rotary position embedding: queries and keys are rotated by angles that grow with position."""

    layout: Layout = "halves"
    fraction: PositiveShare = 1.0  # of the channels of each head, rounded down
    base: Base = 10000.0
    bases: tuple[Base, ...] = ()  # bases of the layers in turn, repeated as needed, instead of `base`
    rotated: tuple[
        bool, ...
    ] = ()  # whether the layers in turn are rotated, repeated as needed; by default all
    extension: RopeExtensionConfig | None = None

    kind: ClassVar[str] = "rope"
    paper: ClassVar[str] = "Su et al. 2021 (RoFormer), section 3.2"

    def build(self, shape: Shape) -> "Rope":
        return Rope(self, shape.head_size)

    @property
    def per_layer(self) -> tuple["RopeConfig", ...]:
        """Return the configurations of the layers in turn, each with a single base."""
        if not self.bases:
            return (self,)
        return tuple(dataclasses.replace(self, base=base, bases=()) for base in self.bases)

    @classmethod
    def examples(cls) -> tuple["RopeConfig", ...]:
        extensions = [way for kind in EXTENSIONS for way in kind.examples()]
        partial = cls(layout="pairs", fraction=0.5, base=500.0)
        return (
            cls(),
            cls(bases=(500.0, 20.0)),
            cls(rotated=(True, False)),
            partial,
            *(dataclasses.replace(partial, extension=way) for way in extensions),
        )


class Rope(Position):
    """The module that rotates the queries and new keys of every layer; cached keys are already rotated."""

    counts_in_cache = True

    def __init__(self, config: RopeConfig, head_size: int):
        super().__init__()
        self.config, self.width = config, int(head_size * config.fraction)
        self.pairs = ChannelPairs(config.layout, self.width)
        self.per_layer = config.per_layer
        if self.width < 2 or self.width % 2:
            raise InputError(
                f"fraction: expected an even number of rotated channels, got {self.width} "
                f"({config.fraction} of head_size {head_size}); change one of the two, or the rotary_size of "
                "latent attention"
            )

    @property
    def rotates_parts(self) -> bool:
        """Whether sets of pairs are rotated by different angles."""
        return isinstance(self.config.extension, LengthExtensionConfig)

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """Return R_i q_i and R_j k_j; q and k in a layer without rotation."""
        if not self._rotates(site):
            return q, k
        config = self._of_layer(site)

        def cos_sin() -> tuple[Tensor, Tensor]:
            size = 1.0 if config.extension is None else config.extension.channel_scale
            theta = frequencies(config, self.width, q.device)
            return self.pairs.cos_sin(query_positions(q, context) * theta, q.dtype, size)

        # Layers with the same base share cos and sin.
        cos, sin = context.once((config, self.width, q.dtype, q.device), cos_sin)
        return self.pairs.rotate(q, cos, sin), self.pairs.rotate(k, cos, sin)

    def count_in_cache(self, cache: SinkCache) -> None:
        """Count positions inside a cache; raises `InputError` if it is longer than an extension's texts."""
        extension = self.config.extension
        if isinstance(extension, LengthExtensionConfig) and cache.size > extension.original_max_positions:
            raise InputError(
                f"memory: with the extension {quote(extension.kind)}, expected first + length of at most "
                f"original_max_positions {extension.original_max_positions}, got {cache.size}; use a shorter "
                "memory, or the extension 'yarn'"
            )
        super().count_in_cache(cache)

    def rotate_in_cache(self, q: Tensor, context: Context, site: Site) -> Tensor:
        """Return R_(C - 1 - i) q_i for the queries at positions i >= C, the others as they are."""
        return self._in_cache(q, site).queries(q, context) if self._rotates(site) else q

    def keys_in_cache(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Tensor | None:
        """Return R_(i - C + 1) k_j of the first tokens j, for a query at position i >= C, and other keys."""
        return self._in_cache(q, site).keys(q, k, context) if self._rotates(site) else None

    def parts(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[RotatedPart, ...]:
        """Return the sets of pairs that an extension rotates further; none for a short text."""
        extension = self.config.extension
        if not isinstance(extension, LengthExtensionConfig) or not self._rotates(site):
            return ()
        if not context.causal or context.shard is not None:
            where = "with context parallelism" if context.causal else "in an encoder"
            raise InputError(
                f"extension: {quote(extension.kind)} depends on the number of tokens up to a query and does "
                f"not work {where}; use 'yarn'"
            )
        config = self._of_layer(site)

        def rotations() -> list[Rotation]:
            theta = frequencies(config, self.width, q.device)
            return extension.rotations(theta, config.base, *position_range(context, 0, context.q_len))

        key, further = ("rotations", config, self.width, q.dtype, q.device), self.pairs.rotate_further
        return tuple(
            RotatedPart(
                further(q, rotation.queries, query_positions, context, (*key, index)),
                further(k, rotation.keys, key_positions, context, (*key, index)),
                rotation.pairs,
            )
            for index, rotation in enumerate(context.once(key, rotations))
        )

    def _in_cache(self, q: Tensor, site: Site) -> RotationInCache:
        """Return the rotations of a layer inside `cache`."""
        assert self.cache is not None
        config = self._of_layer(site)
        theta = lambda: frequencies(config, self.width, q.device)  # noqa: E731
        return RotationInCache(self.pairs, theta, self.cache, config)

    def _rotates(self, site: Site) -> bool:
        """Return whether a layer is rotated."""
        rotated = self.config.rotated
        return not rotated or rotated[site.layer % len(rotated)]

    def _of_layer(self, site: Site) -> RopeConfig:
        return self.per_layer[site.layer % len(self.per_layer)]


def frequencies(config: RopeConfig, width: int, device: torch.device) -> Tensor:
    """Return theta [W/2], the angle of each pair between two neighbouring positions, with the extension."""
    even = torch.arange(0, width, 2, device=device, dtype=angle_dtype(device))
    theta = config.base ** (-even / width)
    return theta if config.extension is None else config.extension.scaled_frequencies(theta, config.base)
