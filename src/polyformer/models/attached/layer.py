"""The attachments of one attention layer, as a module inside the layer, and the rule that bounds its cache.

The rule is a memory with positions inside the cache, or a policy.
"""

import dataclasses
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.attention.patterns.mods import Mod, is_own
from polyformer.attention.positions import BoundPosition
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site
from polyformer.attention.positions.rope import query_positions
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.sequence.context import Context
from polyformer.models.attached.attention_layers import Rotary, RotaryInCache
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


# The name of the module inside a layer, and of the implementation in `AttentionInterface`.
NAME = "polyformer"


class Attached(nn.Module):
    """A pattern, a position scheme and a `score_mod` for one layer; the module is never called.

    A scheme's own parameters start from 0, so that the model's outputs are unchanged at first.
    """

    def __init__(
        self,
        index: int,
        pattern: Pattern | None = None,
        position: PositionConfig | None = None,
        score_mod: ScoreMod | None = None,
        num_heads: int = 1,
        bound: Bound | None = None,
    ):
        super().__init__()
        self.index, self.pattern, self.score_mod = index, pattern, score_mod
        self.position = None if position is None else build_scheme(position, num_heads)
        self.position_config = position
        self.site = Site(index, _no_projection, _no_projection)
        self.bound = bound
        self.hook: RemovableHandle | None = None  # of the layer, for its bounded cache

    @property
    def dropping(self) -> Bound | None:
        """The rule for the layer's cache, if it drops keys."""
        return self.bound if self.bound is not None and self.bound.drops_keys else None

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """Return the scheme's relative terms for the scores of q [B, H, Tq, D] and k [B, H, Tk, D]."""
        return None if self.position is None else self.position.relative(q, k, context, self.site)

    def mods(self, q: Tensor, k: Tensor, context: Context) -> list[ScoreMod]:
        """Return the functions that change scores: the scheme's, then the user's; their indices broadcast."""
        own = None if self.position is None else self.position.score_mod(q, k, context, self.site)
        score_type = torch.promote_types(q.dtype, torch.float32)
        return [
            mod if is_own(mod) else Mod.of(mod, "score_mod", score_type, q.device, start)
            for mod, start in ((own, 0), (self.score_mod, context.offset))
            if mod is not None
        ]

    def extra_repr(self) -> str:
        """Return a description of the attachments in one line."""
        parts = [] if self.pattern is None else [text_of(self.pattern)]
        parts += [] if self.position_config is None else [_call_of(self.position_config)]
        parts += [] if self.bound is None else [_call_of(self.bound.rule, whole=True)]  # its budget
        if self.score_mod is not None:
            parts.append(f"score_mod {getattr(self.score_mod, '__name__', type(self.score_mod).__name__)}")
        return ", ".join(parts) or "nothing of its own"


def has_text(pattern: Pattern) -> bool:
    """Return whether a pattern has an expression: no part of it is a function."""
    try:
        pattern.to_text()
    except InputError:
        return False
    return True


def text_of(pattern: Pattern) -> str:
    """Return a pattern as an expression, or the name of its function if it has no text."""
    return pattern.to_text() if has_text(pattern) else "a mask_mod"


def build_scheme(config: PositionConfig, num_heads: int) -> Position:
    """Return the module of a scheme for one layer, its parameters 0.

    Raises `InputError` for a scheme that requires more than scores: the input, or the layer's projections.
    """
    # The smallest sizes: schemes added to scores read only the number of heads.
    position = config.build(Shape(hidden_size=2 * num_heads, num_heads=num_heads, head_size=2))
    if not _is_bias(position, num_heads):
        raise InputError(
            f"position: {quote(config.kind)} is not added to scores, or reads more than distances, "
            "which a layer of another library cannot give; take 'alibi' or 't5'"
        )
    for parameter in position.parameters():
        nn.init.zeros_(parameter)
    return position


def _is_bias(position: Position, num_heads: int) -> bool:
    """Return whether a scheme only adds numbers to scores, by distance or by its own function."""
    kind = type(position)
    plain = kind.embed is Position.embed and not position.rotates and position.adds_terms
    if not plain or position.adds_to_queries or position.num_relations:
        return False
    q = torch.zeros(1, num_heads, 1, 2)
    with torch.no_grad():
        terms = position.relative(q, q, Context(1, 1), Site(0, _no_projection, _no_projection))
    return terms is None or terms.tables.keys() == {"bias"}


def remove_attached(module: nn.Module) -> None:
    """Remove the attachments of a layer, if it has any."""
    attachment = attached(module)
    if attachment is None:
        return
    if attachment.hook is not None:
        attachment.hook.remove()
    delattr(module, NAME)


def attached(module: nn.Module) -> Attached | None:
    """Return the attachments of a layer, or None."""
    attachment = module._modules.get(NAME)
    return attachment if isinstance(attachment, Attached) else None


def _call_of(config: Config, whole: bool = False) -> str:
    """Return a configuration as a call, with its options that differ from their defaults; `whole`: all."""
    values = {
        field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)
    }
    options = ", ".join(
        f"{name}={value}" for name, (value, default) in values.items() if whole or value != default
    )
    return f"{config.kind}({options})" if options else config.kind


def _no_projection(x: Tensor) -> Tensor:
    raise InputError("position: this scheme projects by the layer's own matrices; take 'alibi' or 't5'")
