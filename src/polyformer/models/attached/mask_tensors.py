"""Masks and biases in the form of tensors over all pairs: a pattern, and a function of scores."""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class Table(Pattern, named=False):
    """The pattern of a tensor [B or 1, H or 1, Tq or 1, Tk] of bool, True for attended keys."""

    entries: Tensor

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return entries[b, h, i, j]."""
        return look_up(self.entries, b, h, q_idx, kv_idx)


def look_up(table: Tensor, *places: Tensor) -> Tensor:
    """Return entries of a table; an axis of length 1 broadcasts."""
    index = [place if size > 1 else torch.zeros_like(place) for place, size in zip(places, table.shape)]
    return table[tuple(index)]


def add_bias(bias: Tensor) -> ScoreMod:
    """Return the function score + bias[b, h, i, j], for a tensor [B or 1, H or 1, Tq or 1, Tk]."""

    @step("bias of the pair")
    @broadcasts
    def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + look_up(bias, b, h, q_idx, kv_idx)

    return add


def split_mask(mask: Tensor, kv_length: int) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask of any model as entries of bool and a bias, either None if it has no effect.

    mask: [B, Tk] with 0 at padding, or 4 axes that broadcast to [B, H, Tq, Tk]: bool, True for attended keys,
    or numbers to add to the scores; numbers near the minimum of their type hide a key.
    """
    if mask.dim() == 2:
        mask = mask[:, None, None, :].bool()
    if mask.dim() == 3:
        mask = mask[:, None]
    mask = mask[..., :kv_length]
    if mask.dtype == torch.bool:
        return mask, None
    # Libraries hide keys by the minimum, by half of it, or by -inf.
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if torch.compiler.is_compiling() or mask.requires_grad:
        return ~hidden, mask.masked_fill(hidden, 0)
    seen = None if not bool(hidden.any()) else ~hidden
    bias = mask.masked_fill(hidden, 0)
    return seen, bias if bool(bias.any()) else None
