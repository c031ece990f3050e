"""What a position scheme may do: change the input, rotate queries and keys, or add to scores and values."""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.dot_product.relative import Relative
from polyformer.patterns.base import ScoreMod
from polyformer.patterns.mods import Mod, is_own
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The stack that a scheme is built for: E, layers, learned positions, and its heads H of width D.

    `embedding_size`: the width of the embedding sum, where that is not E.
    """

    hidden_size: int
    embedding_size: int | None = None
    num_layers: int = 1
    max_positions: int = 512
    num_heads: int = 1
    head_size: int = 1

    @property
    def input_size(self) -> int:
        """The width of the embedding sum."""
        return self.embedding_size or self.hidden_size


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """The attention layer that asks: its index, its own projections of vectors [R, E] to heads [H, R, D]."""

    layer: int
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionConfig(Config):
    """Family of position schemes: `build(shape)` makes the module.

    `adds_vector`: all it does is to add one vector for each position to the first layer's input.
    """

    adds_vector: ClassVar[bool] = False

    def build(self, shape: Shape) -> "Position":
        """The module for all layers of a stack of this shape."""
        raise NotImplementedError

    def longer(self, before: int, after: int) -> "PositionConfig":
        """The same for `after` positions in place of `before`: what it computes of the first ones stays."""
        return self


class Position(nn.Module):
    """One scheme for a whole stack; every method is the identity unless the scheme says otherwise.

    What layers have of their own (tables, projections) lies here too, found by `site.layer`.
    """

    max_positions: int | None = None
    """How many positions there are; None when there is no end to them."""

    adds_to_queries = False
    """Whether vectors of its own meet the keys beside the queries."""

    widens = False
    """Whether `embed` brings the embedding sum to the width of the stack."""

    adds_sinusoids = False
    """Whether `embed` adds sinusoids to the token vectors: vectors of length sqrt(E / 2), none learned."""

    farthest: int | None = None
    """The distance from which on `relative` says the same of all, on either side; None for no such."""

    num_relations: int | None = None
    """How many labels of pairs it embeds; None when it takes none."""

    def position_tables(self) -> dict[str, int]:
        """Parameters with a row for each position, by name, and how many rows before are no position's."""
        return {}

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """The input x [B, T, E] of layer `layer`, with its positions pos [T] or [B, T] made visible."""
        return x

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """q [B, H, Tq, D] and the new keys k [B, Hkv, Tq, D] rotated by their positions."""
        return q, k

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod | None:
        """What is done to the scores of q [B, H, Tq, D] and all keys k [B, Hkv, Tk, D], by any function.

        q_idx counts the queries of q: the slot of one among the keys is `q_idx + context.offset`. Where a
        sequence is spread over processes (`context.share`), k has this process's keys and kv_idx counts all
        slots: ask the context for distances and positions. A function that is written for indices that
        broadcast is faster marked so: `core.mods.broadcasts`.
        """
        return None

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative | None:
        """What is added by distance to the scores of q [B, H, Tq, D] and all keys k [B, Hkv, Tk, D]."""
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
    """A scheme as one layer's mechanism meets it (`core.mechanism.ScoreTerms`)."""

    position: Position
    site: Site

    @property
    def farthest(self) -> int | None:
        """The scheme's."""
        return self.position.farthest

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod | None:
        """The scheme's, a user's function prepared for indices that broadcast."""
        mod = self.position.score_mod(q, k, context, self.site)
        if mod is None or is_own(mod):
            return mod
        score = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        return Mod.of(mod, "score_mod", score, q.device)

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """The scheme's, for this layer."""
        return self.position.relative(q, k, context, self.site)


def changes_scores(position: Position) -> bool:
    """Whether the scheme needs a mechanism that has scores."""
    kind = type(position)
    return kind.score_mod is not Position.score_mod or kind.relative is not Position.relative


def related(context: Context, relation_ids: Tensor, rows: int, position: Position) -> Context:
    """`context` with labels [B, Tq, Tk] of its pairs of tokens.

    Raises `InputError` where the scheme takes none, for another shape, and for labels that it does not have.
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
    if relation_ids.device.type == "cpu" and not torch.compiler.is_compiling() and relation_ids.numel():
        low, high = (int(bound) for bound in relation_ids.aminmax())
        if low < -1 or high >= count:
            raise InputError(
                f"relation_ids: expected labels from 0 to {count - 1}, or -1 for none, got {low} to {high}"
            )
    return dataclasses.replace(context, relations=relation_ids.long())


def check_positions(pos: Tensor, count: int) -> None:
    """Raises `InputError` for positions beyond a learned table of `count`.

    Where looking is cheap: on the CPU, outside compiled code. Elsewhere the lookup itself raises.
    """
    if pos.device.type != "cpu" or torch.compiler.is_compiling() or not pos.numel():
        return
    length = int(pos.max()) + 1
    if length > count:
        raise InputError(
            f"input of {length} tokens: longer than the {count} learned "
            f"positions (max_position_embeddings); shorten the text or choose another position scheme"
        )


def widest(device: torch.device) -> torch.dtype:
    """The type that angles are made in, so that far positions stay exact: float64 where there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


def sinusoids(pos: Tensor, width: int, base: float = 10000.0) -> Tensor:
    """PE(p, 2i) = sin(p / base^(2i/width)), PE(p, 2i+1) = cos of the same: [..., width] in `widest`."""
    dtype = widest(pos.device)
    even = torch.arange(0, width, 2, device=pos.device, dtype=dtype)
    angles = pos.unsqueeze(-1).to(dtype) * torch.exp(even * (-math.log(base) / width))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :width]
