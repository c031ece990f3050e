"""RoPE: queries and keys are rotated by angles proportional to position, so scores depend on distances.

    q_i . k_j = (R_i q)^T (R_j k) = q^T R_(j-i) k        channels in pairs, pair m rotated by pos * theta_m
    theta_m = base^(-2m / W), m = 0 .. W/2 - 1           the first W = fraction * D channels of each head
    (a, b) becomes (a cos x - b sin x, b cos x + a sin x)        for a pair of channels with the angle x

`layout` sets the pairs of channels: m and m + W/2 ("halves": GPT-NeoX, Llama), or 2m and 2m + 1 ("pairs": the
paper, GPT-J). Values are not rotated. An `extension` adapts a model trained on short texts to longer texts
(`rope_extensions`). RoPE has no parameters and costs a few passes over q and k. The angles are computed in
float64, once for all layers with the same base; ModernBERT has a smaller base in layers with a window, and
SmolLM3 layers without rotation. Su et al. 2021, section 3.2; rotation of a fraction of the channels as in
GPT-J and GPT-NeoX. The temperature of YaRN multiplies the rotated channels, as in its authors' code: if
`fraction` is below 1, the other channels are not scaled.

Inside a bounded cache a query at position i is the last of the C entries (`SinkCache`): for its products with
the first tokens it is rotated further, by min(i, C - 1) - i positions. For a single query, the first keys can
be rotated by as many positions instead.

xPos also lets pairs of channels fade with the distance (Sun et al. 2022, section 3):

    q_i . k_j = sum_m zeta_m^((i - j) / b) (R_i q)_m . (R_j k)_m    zeta_m = (2 m / D + gamma) / (1 + gamma)

Queries are multiplied by zeta^(i / b) and keys by zeta^(-j / b), so that a KV cache has keys that need no
further change. These factors grow with the position: float32 holds about 70 b positions with gamma =
0.4, float16 for 8 b. Later keys, which only an encoder sees, grow by the same factors instead of fading.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.positions.base import Position, PositionConfig, Shape, SinkCache, Site, angle_dtype
from polyformer.attention.positions.rope_extensions import (
    Angles,
    DynamicNtkConfig,
    InterpolationConfig,
    LengthExtensionConfig,
    Llama3Config,
    LongRopeConfig,
    NtkConfig,
    RopeExtensionConfig,
    Rotation,
    SelfExtendConfig,
    YarnConfig,
    position_range,
)
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import PositiveFloat, PositiveShare
from polyformer.core.sequence.context import Context

Layout = Literal["halves", "pairs"]
Positions = Callable[[Tensor, Context], Tensor]


@dataclasses.dataclass(frozen=True)
class ChannelPairs:
    """The first `width` channels W of every head in pairs: m and m + W/2 ("halves"), or 2m and 2m + 1."""

    layout: Layout
    width: int

    def cos_sin(self, angles: Tensor, dtype: torch.dtype, size: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return cos and sin (with the signs of a pair) [B or 1, 1, T, W] of angles [B or 1, 1, T, W/2]."""
        cos, sin = angles.cos(), angles.sin()
        waves = self._join(cos, cos), self._join(-sin, sin)
        return (waves[0] * size).to(dtype), (waves[1] * size).to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x [B, H, T, D] with its first W channels rotated."""
        # x cos plus the swapped pair times the signed sin.
        rotated = x[..., : self.width]
        if self.layout == "halves":
            others = rotated.roll(self.width // 2, -1)
        else:
            others = self._join(rotated[..., 1::2], rotated[..., ::2])
        rotated = torch.addcmul(rotated * cos, others, sin)
        return rotated if self.width == x.shape[-1] else torch.cat([rotated, x[..., self.width :]], -1)

    def rotate_further(
        self,
        x: Tensor,
        angles: Angles | None,
        positions: Positions,
        context: Context,
        key: tuple[Hashable, ...],
    ) -> Tensor:
        """Return x [B, H, T, D] rotated by the angles at its positions, which layers share by `key`."""
        if angles is None:
            return x
        make = lambda: self.cos_sin(angles(positions(x, context)), x.dtype)  # noqa: E731
        return self.rotate(x, *context.once((*key, self, x.dtype, x.device, positions), make))

    def _join(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the channels [..., W] of the first and the second members [..., W/2] of all pairs."""
        if self.layout == "halves":
            return torch.cat([first, second], -1)
        return torch.stack([first, second], -1).flatten(-2)


@dataclasses.dataclass(frozen=True, eq=False)
class RotationInCache:
    """The rotations of a layer inside a cache.

    theta: a function that returns the angles [W/2] between two neighbouring positions; `key` identifies them.
    """

    pairs: ChannelPairs
    theta: Callable[[], Tensor]
    cache: SinkCache
    key: Hashable

    def queries(self, q: Tensor, context: Context) -> Tensor:
        """Return R_(C - 1 - i) q_i for the queries at positions i >= C, the others as they are."""
        last = self.cache.size - 1

        def angles(pos: Tensor) -> Tensor:
            return (pos.clamp_max(last) - pos) * self.theta()

        key = "in cache", self.key, last
        return self.pairs.rotate_further(q, angles, query_positions, context, key)

    def keys(self, q: Tensor, k: Tensor, context: Context) -> Tensor | None:
        """Return R_(i - C + 1) k_j of the first tokens j, for a query at position i >= C, and other keys.

        None if the slots of the first tokens are not known.
        """
        first, last = self.cache.first, self.cache.size - 1
        slots = context.prefix or (first if context.kv_pos is None else 0)
        if not slots:
            return None

        def angles(pos: Tensor) -> Tensor:
            further = (query_positions(q, context) - last).clamp_min(0)
            return (further * (pos < first)) * self.theta()

        key = "keys in cache", self.key, last
        turned = self.pairs.rotate_further(k[:, :, :slots], angles, key_positions, context, key)
        return torch.cat([turned, k[:, :, slots:]], 2)


def query_positions(q: Tensor, context: Context) -> Tensor:
    """Return the positions of the queries, [B or 1, 1, Tq, 1]."""
    rows, slots = (torch.arange(n, device=q.device) for n in (q.shape[0], q.shape[2]))
    # The axis of size 1 before Tq broadcasts over heads.
    return context.query_position(rows.unsqueeze(1), slots).unsqueeze(-1).unsqueeze(-3)


def key_positions(k: Tensor, context: Context) -> Tensor:
    """Return the positions of the keys, [B or 1, 1, Tk, 1]."""
    rows, slots = (torch.arange(n, device=k.device) for n in (k.shape[0], k.shape[2]))
    return context.key_position(rows.unsqueeze(1), slots).unsqueeze(-1).unsqueeze(-3)


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
    # Whether the layers in turn are rotated, repeated as needed; by default all are.
    rotated: tuple[bool, ...] = ()
    extension: RopeExtensionConfig | None = None

    kind: ClassVar[str] = "rope"
    paper: ClassVar[str] = "Su et al. 2021 (RoFormer), section 3.2"

    def build(self, shape: Shape) -> "Rope":
        kind = Rope if all(self.rotated) else PartlyRotatedRope
        return kind(self, shape.head_size)

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
        self.rotates_parts = isinstance(config.extension, LengthExtensionConfig)
        if self.width < 2 or self.width % 2:
            raise InputError(
                f"fraction: expected an even number of rotated channels, got {self.width} "
                f"({config.fraction} of head_size {head_size}); change one of the two, or the rotary_size of "
                "latent attention"
            )

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """Return R_i q_i and R_j k_j."""
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
        return self._in_cache(q, site).queries(q, context)

    def keys_in_cache(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Tensor | None:
        """Return R_(i - C + 1) k_j of the first tokens j, for a query at position i >= C, and other keys."""
        return self._in_cache(q, site).keys(q, k, context)

    def parts(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[RotatedPart, ...]:
        """Return the sets of pairs that an extension rotates further; none for a short text."""
        extension = self.config.extension
        if not isinstance(extension, LengthExtensionConfig):
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

    def _of_layer(self, site: Site) -> RopeConfig:
        return self.per_layer[site.layer % len(self.per_layer)]


class PartlyRotatedRope(Rope):
    """RoPE in a part of the layers; the others have no positions."""

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """Return R_i q_i and R_j k_j; q and k in a layer without rotation."""
        return super().rotate(q, k, context, site) if self._rotates(site) else (q, k)

    def rotate_in_cache(self, q: Tensor, context: Context, site: Site) -> Tensor:
        """Return the queries of `Rope`; q in a layer without rotation."""
        return super().rotate_in_cache(q, context, site) if self._rotates(site) else q

    def keys_in_cache(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Tensor | None:
        """Return the keys of `Rope`; None in a layer without rotation."""
        return super().keys_in_cache(q, k, context, site) if self._rotates(site) else None

    def parts(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[RotatedPart, ...]:
        """Return the parts of `Rope`; none in a layer without rotation."""
        return super().parts(q, k, context, site) if self._rotates(site) else ()

    def _rotates(self, site: Site) -> bool:
        """Return whether a layer is rotated."""
        rotated = self.config.rotated
        return rotated[site.layer % len(rotated)]


def frequencies(config: RopeConfig, width: int, device: torch.device) -> Tensor:
    """Return theta [W/2], the angle of each pair between two neighbouring positions, with the extension."""
    even = torch.arange(0, width, 2, device=device, dtype=angle_dtype(device))
    theta = config.base ** (-even / width)
    return theta if config.extension is None else config.extension.scaled_frequencies(theta, config.base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class XposConfig(PositionConfig):
    """Rotary positions with a decay of each pair of channels by the distance (xPos).

    It is a separate scheme and not an option of `rope`, so that files of other libraries, which know `rope`
    alone, cannot lose the decay.

    `base`: of the angles. `gamma`: the smallest decay of the fastest pair is gamma / (1 + gamma) for each
    `scale_base` positions.
    """

    base: Base = 10000.0
    gamma: PositiveFloat = 0.4
    scale_base: PositiveFloat = 512.0

    kind: ClassVar[str] = "xpos"
    paper: ClassVar[str] = "Sun et al. 2022 (Length-Extrapolatable Transformer), section 3"

    @classmethod
    def examples(cls) -> tuple["XposConfig", ...]:
        """Return a decay that short texts show."""
        return (cls(base=500.0, scale_base=20.0),)

    def build(self, shape: Shape) -> "Xpos":
        return Xpos(self, shape.head_size)


class Xpos(Position):
    """The module that rotates and scales the queries and new keys of every layer."""

    def __init__(self, config: XposConfig, head_size: int):
        super().__init__()
        if head_size % 2:
            raise InputError(f"head_size: 'xpos' rotates pairs of channels, expected 2 n, got {head_size}")
        self.config, self.width = config, head_size
        self.pairs = ChannelPairs("halves", head_size)

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """Return zeta^(i / b) R_i q_i and zeta^(-j / b) R_j k_j."""
        waves = context.once(
            ("xpos", self.config, self.width, q.dtype, q.device), lambda: self._waves(q, context)
        )
        return self.pairs.rotate(q, *waves[:2]), self.pairs.rotate(k, *waves[2:])

    def _waves(self, q: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the scaled cos and sin [B or 1, 1, Tq, D] of the queries, then those of the keys."""
        config, dtype = self.config, angle_dtype(q.device)
        even = torch.arange(0, self.width, 2, device=q.device, dtype=dtype) / self.width
        pos = query_positions(q, context).to(dtype)
        cos, sin = self.pairs.cos_sin(pos * config.base**-even, dtype)
        log_decay = ((even + config.gamma) / (1 + config.gamma)).log() * (pos / config.scale_base)
        growth = torch.cat([log_decay, log_decay], -1).exp()  # of both channels of each pair
        waves = cos * growth, sin * growth, cos / growth, sin / growth
        q_cos, q_sin, k_cos, k_sin = (wave.to(q.dtype) for wave in waves)
        return q_cos, q_sin, k_cos, k_sin
