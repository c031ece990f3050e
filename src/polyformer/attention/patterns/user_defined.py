"""User functions as patterns: any FlexAttention `mask_mod`, with or without a layout."""

import dataclasses
import functools

import torch
from torch import Tensor

from polyformer.attention.patterns.base import MaskMod, Pattern, Where
from polyformer.attention.patterns.layout import Keys, clip, unite
from polyformer.attention.patterns.mods import Mod, is_own
from polyformer.core.errors import InputError, quote
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class MaskModPattern(Pattern, named=False):
    """Any FlexAttention `mask_mod`, from this library or a user; without a layout it may see every key.

    by_slot: queries of the function and of `where` count among all keys, so that a decoder with a cache gives
    the same result as one pass; otherwise from 0. A function that `broadcasts` always gets the queries of the
    call.
    """

    function: MaskMod
    where: Where | None = None
    by_slot: bool = True

    def is_static(self) -> bool:
        """Return False: a function may read values that change, and keep them alive."""
        return False

    def is_program(self) -> bool:
        """Return whether the function is bound and is known to depend on its indices only."""
        return isinstance(self.function, Mod) and self.function.program is not None and self.where is None

    def bind(self, by_slot: bool, device: torch.device) -> Pattern:
        """Run the function once on scalars, which shows whether its indices may broadcast."""
        if is_own(self.function):
            return self
        mod = Mod.of(self.function, "mask_mod", None, device)
        return dataclasses.replace(self, function=mod, by_slot=by_slot)

    def _first_query(self, context: Context) -> int:
        """Return the index of the first query in the function's numbering."""
        own = is_own(self.function) and not isinstance(self.function, Mod)
        return context.offset if self.by_slot and not own else 0

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys from `where`; without it every key."""
        if self.where is None:
            return super().keys(context, start, stop)
        start, stop = start + self._first_query(context), stop + self._first_query(context)
        if callable(self.where):
            keys = self.where(start, stop)
        else:
            # Several rows of the caller's layout may overlap this one.
            rows = [row.keys for row in self.where if row.start < stop and start < row.stop]
            keys = functools.reduce(lambda a, b: Keys((a | b).some, (a & b).full), rows) if rows else Keys(())
        inside = clip(0, context.kv_len, context.kv_len)
        return Keys(unite(keys.some), unite(keys.full)) & Keys(inside, inside)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the starts of the rows of the caller's layout."""
        if self.where is None or callable(self.where):
            return ()
        return tuple(row.start - self._first_query(context) for row in self.where)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return function(b, h, i, j)."""
        if not is_own(self.function):  # called outside of `attend`
            return self.bind(self.by_slot, q_idx.device).allows(context, b, h, q_idx, kv_idx)
        return self.function(b, h, q_idx + self._first_query(context), kv_idx)

    def to_text(self) -> str:
        """Raise `InputError`: a function has no expression."""
        raise InputError("pattern: a function (mask_mod) cannot be saved; write it as a Pattern class")


def as_pattern(pattern: Pattern | MaskMod | str, name: str = "pattern") -> Pattern:
    """Return the pattern of an expression or of a bare `mask_mod`; a pattern unchanged.

    Raises `InputError`, which calls the argument `name`.
    """
    if isinstance(pattern, Pattern):
        return pattern
    if isinstance(pattern, str):
        return _cached_from_text(pattern)
    if callable(pattern):
        return MaskModPattern(pattern)
    if hasattr(pattern, "mask_mod") and hasattr(pattern, "kv_num_blocks"):
        raise InputError(f"{name}: got a BlockMask; pass the function it was made of, block_mask.mask_mod")
    raise InputError(f"{name}: expected a Pattern, its text or a mask_mod function, got {quote(pattern)}")


_cached_from_text = functools.lru_cache(maxsize=256)(Pattern.from_text)
"""The pattern of an expression, cached: `attend` needs it in every call."""
