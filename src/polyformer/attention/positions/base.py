"""Base of position schemes, which change the input, rotate queries and keys, or add to scores and values."""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns import Global, Pattern, Window, Without
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import Mod, is_own
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.host_values import bounds, host_values
from polyformer.core.sequence.context import Context, Image


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the stack that a scheme is built for: E, layers, learned positions, H heads of width D.

    `embedding_size`: the width of the embedding sum if it differs from E. `image`: the image if the tokens
    are patches of an image.
    """

    hidden_size: int
    embedding_size: int | None = None
    num_layers: int = 1
    max_positions: int = 512
    num_heads: int = 1
    head_size: int = 1
    image: Image | None = None

    @property
    def input_size(self) -> int:
        """Return the width of the embedding sum."""
        return self.embedding_size or self.hidden_size


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """The calling attention layer: its index and its projections of vectors [R, E] to heads [H, R, D]."""

    layer: int
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]


class SinkCache(NamedTuple):
    """A cache of the first `first` tokens of a text and its latest `length` tokens (Xiao et al. 2024).

    A query is the last entry of the cache when it is computed, so with C = first + length entries

        distance(i, j) = min(i, C - 1) - j     of a query i and a token j < first that is not among the latest
        distance(i, j) = i - j                 of the `length` latest tokens up to the query

    Both sets of pairs are computed as parts of a call and joined by log-sum-exp.
    """

    first: int
    length: int

    @property
    def size(self) -> int:
        """Return the number C of its entries."""
        return self.first + self.length

    @property
    def latest(self) -> Pattern:
        """Return the pairs of queries with the latest tokens."""
        return Window(self.length - 1, 0)

    @property
    def pattern(self) -> Pattern:
        """Return all pairs."""
        return self.latest | Global(self.first)

    @property
    def distant(self) -> Pattern:
        """Return the pairs of queries with first tokens that are not among the latest."""
        return Without(Global(self.first), self.latest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionConfig(Config):
    """Family of position schemes: `build(shape)` creates the module.

    `adds_vector`: the scheme only adds a vector for each position to the input of the first layer.
    """

    option: ClassVar[str] = "model.position"
    adds_vector: ClassVar[bool] = False

    def build(self, shape: Shape) -> "Position":
        """Return the module for all layers of a stack of this shape."""
        raise NotImplementedError

    def with_max_positions(self, before: int, after: int) -> "PositionConfig":
        """Return a configuration for `after` positions instead of `before`, with the same first positions."""
        return self


class Position(nn.Module):
    """A position scheme for a whole stack; every method is the identity unless the scheme overrides it.

    Tables and projections of single layers belong to this module too, indexed by `site.layer`.
    """

    max_positions: int | None = None
    """Number of positions; None if it is unlimited."""

    adds_to_queries = False
    """True if the scheme multiplies the keys with further vectors in addition to the queries."""

    projects_input = False
    """True if `embed` maps the embedding sum to the width of the stack."""

    adds_sinusoids = False
    """True if `embed` adds sinusoids to the token vectors: fixed vectors of length sqrt(E / 2)."""

    rotates = False
    """Whether `rotate` changes queries and keys."""

    adds_terms = False
    """Whether `score_mod` or `relative` add terms to the scores, so that a mechanism must have scores."""

    embeds_layers: bool = False
    """Whether `embed` changes the inputs of layers after the first; by default that of any layer."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.rotates = cls.rotate is not Position.rotate
        adds = cls.score_mod is not Position.score_mod or cls.relative is not Position.relative
        cls.adds_terms = adds
        if "embed" in cls.__dict__ and "embeds_layers" not in cls.__dict__:
            cls.embeds_layers = True

    rotates_parts: bool = False
    """Whether `parts` may return sets of pairs."""

    @property
    def is_plain(self) -> bool:
        """Whether scores are products of rotated queries and keys, of all pairs in one way."""
        return self.cache is None and not self.adds_terms and not self.rotates_parts

    farthest: int | None = None
    """The distance from which on `relative` is constant, on either side; None if it never is."""

    adds_bias = False
    """True if scores change only by a bias for each head and distance, the `bias` of `relative`."""

    counts_in_cache = False
    """True if positions can be counted inside a cache that drops tokens: only distances matter."""

    cache: SinkCache | None = None
    """The cache inside which positions are counted (`count_in_cache`)."""

    num_relations: int | None = None
    """Number of labels of token pairs that the scheme embeds; None if it takes no labels."""

    def position_tables(self) -> dict[str, int]:
        """Return the names of parameters with a row per position and the number of other rows before them."""
        return {}

    def count_in_cache(self, cache: SinkCache) -> None:
        """Count positions inside a cache; raises `InputError` if the scheme cannot."""
        if not self.counts_in_cache:
            raise InputError(
                f"memory: {type(self).__name__} positions cannot be counted inside a cache; use a scheme of "
                "distances: 'rope', 'alibi', 't5', 'transformer_xl' or 'none'"
            )
        self.cache = cache

    def rotate_in_cache(self, q: Tensor, context: Context, site: Site) -> Tensor:
        """Return the rotated queries [B, H, Tq, D] for distant first tokens, as the last entry of `cache`."""
        return q

    def keys_in_cache(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Tensor | None:
        """Return all keys [B, Hkv, Tk, D], rotated so that a single query has its distances in `cache`.

        None if the scheme does not rotate, or the slots of the first tokens are not known.
        """
        return None

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return the input x [B, T, E] of layer `layer` with its positions pos [T] or [B, T] encoded."""
        return x

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """Return q [B, H, Tq, D] and the new keys k [B, Hkv, Tq, D], rotated by their positions."""
        return q, k

    def parts(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[RotatedPart, ...]:
        """Return disjoint sets of pairs with their own rotations of the queries and of all keys.

        q [B, H, Tq, D] and k [B, Hkv, Tk, D] are rotated by `rotate`. No sets: all pairs are computed from q
        and k.
        """
        return ()

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod | None:
        """Return a function that changes the scores of q [B, H, Tq, D] and all keys k [B, Hkv, Tk, D].

        q_idx counts the queries of q; the slot of a query among the keys is `q_idx + context.offset`. If a
        sequence is spread over processes (`context.shard`), k has the keys of this process and kv_idx counts
        all slots: take distances and positions from the context. A function that is written for indices that
        broadcast is faster if it is marked with `patterns.mods.broadcasts`. None leaves the scores unchanged.
        """
        return None

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative | None:
        """Return the terms by distance for the scores of q [B, H, Tq, D] and all keys k [B, Hkv, Tk, D]."""
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class BoundPosition:
    """A scheme bound to an attention layer, in the form the mechanism uses (`mechanisms.base.ScoreTerms`)."""

    position: Position
    site: Site

    @property
    def farthest(self) -> int | None:
        """Return `farthest` of the scheme."""
        return self.position.farthest

    @property
    def is_plain(self) -> bool:
        """Return whether scores are products of rotated queries and keys, of all pairs in one way."""
        return self.position.is_plain

    def parts(self, q: Tensor, k: Tensor, context: Context) -> tuple[RotatedPart, ...]:
        """Return the sets of pairs with their own rotations or terms; none if all pairs have the same."""
        cache = self.position.cache
        if cache is None:
            return self.position.parts(q, k, context, self.site)
        if context.kv_len + context.skipped <= cache.length:  # all tokens are among the latest
            return ()
        if context.q_len == 1:  # a step of decoding: one call is faster than two parts
            keys = self.position.keys_in_cache(q, k, context, self.site)
            if keys is not None:
                return (RotatedPart(q, keys),)
        q_distant = self.position.rotate_in_cache(q, context, self.site)
        far = context.up_to_position(cache.size - 1, (cache.length, cache.size - 1))
        options = {
            "context": far,
            "score_mod": self.position.score_mod(q_distant, k, far, self.site),
            "relative": self.position.relative(q_distant, k, far, self.site),
        }
        return RotatedPart(q, k, cache.latest), RotatedPart(q_distant, k, cache.distant, options)

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod | None:
        """Return the function of the scheme; a user's function is prepared for indices that broadcast."""
        mod = self.position.score_mod(q, k, context, self.site)
        if mod is None or is_own(mod):
            return mod
        return Mod.of(mod, "score_mod", torch.promote_types(q.dtype, torch.float32), q.device)

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """Return the terms of the scheme for this layer; with a cache, of pairs with its latest tokens."""
        if (cache := self.position.cache) is not None:
            least, greatest = context.distances
            context = context.within_distances((least, min(greatest, cache.length - 1)))
        if cache is not None or not context.skipped:
            return self.position.relative(q, k, context, self.site)
        # Tables are indexed without skipped slots: entries for the keys after them, then for keys before.
        near = context.kv_len - context.prefix - context.q_len
        ranges = (0, near), (near + context.skipped + 1, context.distances[1])
        first, then = (
            self.position.relative(q, k, context.within_distances(part), self.site) for part in ranges
        )
        if first is None or then is None:
            return None
        if first.content is not None:
            return first.followed_by(then)
        return context.once((first, then), lambda: first.followed_by(then))  # layers share plans of a mask


def with_relations(context: Context, relation_ids: Tensor, rows: int, position: Position) -> Context:
    """Return `context` with labels [B, Tq, Tk] for its pairs of tokens.

    Raises `InputError` if the scheme takes no labels, and for a wrong shape or labels out of range.
    """
    count = position.num_relations
    if count is None:
        raise InputError(
            "relation_ids: this model's position scheme takes none; leave them out or use 'relation_labels'"
        )
    shape = rows, context.q_len, context.kv_len
    if tuple(relation_ids.shape) != shape or relation_ids.is_floating_point():
        raise InputError(
            f"relation_ids: expected integers [batch, new tokens, tokens so far] {shape}, "
            f"got {relation_ids.dtype} {tuple(relation_ids.shape)}"
        )
    if (known := bounds(relation_ids)) is not None:
        low, high = known
        if low < -1 or high >= count:
            raise InputError(
                f"relation_ids: expected labels from 0 to {count - 1}, or -1 for none, got {low} to {high}"
            )
    return dataclasses.replace(context, relations=relation_ids.long())


def check_positions(pos: Tensor, count: int) -> None:
    """Raise `InputError` for positions beyond a learned table with `count` rows."""
    length = readable_length(pos)
    if length > count:
        raise InputError(
            f"input of {length} tokens: longer than the {count} learned "
            f"positions (max_position_embeddings); shorten the text or choose another position scheme"
        )


def readable_length(pos: Tensor) -> int:
    """Return the greatest position plus 1; 0 if the host does not know them, as reading them would wait."""
    values = host_values(pos)
    if values is None or not values.numel():
        return 0  # the lookup of a position beyond the table raises there
    return int(values.max()) + 1


def angle_dtype(device: torch.device) -> torch.dtype:
    """Return the type of the angles: float64 where the device has it, so that far positions stay exact."""
    return torch.float32 if device.type == "mps" else torch.float64


def sinusoids(pos: Tensor, width: int, base: float = 10000.0) -> Tensor:
    """Return PE(p, 2i) = sin(p / base^(2i/width)), PE(p, 2i+1) = cos(..): [..., width] in `angle_dtype`."""
    dtype = angle_dtype(pos.device)
    even = torch.arange(0, width, 2, device=pos.device, dtype=dtype)
    angles = pos.unsqueeze(-1).to(dtype) * torch.exp(even * (-math.log(base) / width))
    # For an odd width the last cosine has no channel.
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :width]
