"""The rule that bounds the cache of one layer: a memory with positions inside the cache, or a policy."""

import dataclasses
from typing import Literal

from torch import Tensor, nn

from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.positions import BoundPosition, Position, Site
from polyformer.attention.positions.rope import query_positions
from polyformer.core.sequence.context import Context
from polyformer.models.attached.rotary import Rotary, RotaryInCache
from polyformer.nn.cache import CachePolicy
from polyformer.nn.memory import SinksConfig

Rule = SinksConfig | CachePolicy


@dataclasses.dataclass(eq=False)
class Bound:
    """A memory or a policy, as the rule for the cache of a layer.

    rotary: the rotary positions of the layer, for a memory and for `expected`. position: the layer's scheme,
    once its weights are loaded (`read_rotation`).
    """

    rule: Rule
    rotary: Rotary | None = None
    position: Position | None = None

    @property
    def argument(self) -> Literal["memory", "cache"]:
        """The argument of `attach` for this rule."""
        return "memory" if isinstance(self.rule, SinksConfig) else "cache"

    def read_rotation(self, layer: nn.Module) -> None:
        """Set the position scheme from the layer, once, if the rule needs it."""
        if self.rotary is None or self.position is not None:
            return
        position = self.rotary.position(layer)
        if isinstance(self.rule, SinksConfig):
            self.rule.count_positions(position)
        self.position = position

    def rotated(self, q: Tensor, context: Context, sign: int = 1) -> Tensor:
        """Return queries [B, H, T, D] rotated to their positions, or with sign -1 back to position 0.

        Unchanged for policies that read only rotated queries.
        """
        if isinstance(self.rule, SinksConfig) or not isinstance(self.position, RotaryInCache):
            return q
        return self.position.rotated(q, sign * query_positions(q, context))

    @property
    def drops_keys(self) -> bool:
        """Whether keys may be dropped; otherwise all are kept, as integers."""
        return isinstance(self.rule, SinksConfig) or self.rule.drops_keys

    def within(self, pattern: Pattern | None) -> Pattern | None:
        """Return a pattern, restricted to the pairs of a memory."""
        if not isinstance(self.rule, SinksConfig):
            return pattern
        kept = self.rule.cache.pattern
        return kept if pattern is None else pattern & kept

    def parts(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[RotatedPart, ...]:
        """Return the sets of pairs with their own rotations; none if all pairs have the same."""
        if self.position is None or not isinstance(self.rule, SinksConfig):
            return ()
        parts = BoundPosition(self.position, site).parts(q, k, context)
        # Rotations have no terms of their own in the scores; the terms of the call apply to all parts.
        return tuple(
            part._replace(options={"context": (part.options or {}).get("context", context)}) for part in parts
        )
