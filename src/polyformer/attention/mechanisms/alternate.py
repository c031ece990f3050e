"""Mechanisms that alternate over the layers: layer l has mechanism l, and the list repeats.

Examples are alternating local and global layers (GPT-3, GPT-Neo; the memory-compressed attention of Liu et
al. 2018), or any two mechanisms in one stack. The stack has only the abilities that all mechanisms have.
"""

import dataclasses
from typing import ClassVar

from polyformer.attention.mechanisms.base import CAPABILITIES, Mechanism, MechanismConfig
from polyformer.attention.patterns import Pattern
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlternateConfig(MechanismConfig):
    """Alternating attention: each layer takes the next mechanism of a list, which repeats.

    `mechanisms`: the mechanism of each layer in turn.
    """

    mechanisms: tuple[MechanismConfig, ...]

    kind: ClassVar[str] = "alternate"
    paper: ClassVar[str] = "Liu et al. 2018 (T-DMCA), section 4.2.5"
    supports_part_rotations: ClassVar[bool] = True
    supports_recurrence: ClassVar[bool] = True
    supports_context_parallel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.mechanisms:
            raise InputError("mechanisms: expected 1 mechanism or more, got none")
        # Instance attributes override the class attributes of this frozen config.
        for ability in CAPABILITIES:
            unable = [mechanism for mechanism in self.mechanisms if not getattr(mechanism, ability)]
            if unable:
                object.__setattr__(self, ability, False)
                object.__setattr__(self, "instead", unable[0].instead)
                object.__setattr__(self, "reasons", {**self.reasons, **unable[0].reasons})
        object.__setattr__(
            self, "eager", next((mechanism.eager for mechanism in self.mechanisms if mechanism.eager), "")
        )

    def for_layer(self, layer: int) -> MechanismConfig:
        """Return the mechanism of layer `layer`, modulo the length of the list."""
        return self.mechanisms[layer % len(self.mechanisms)].for_layer(layer)

    def build(self, num_heads: int, head_size: int) -> Mechanism:
        """Return the module of the first layer: outside a stack there is only one layer."""
        return self.for_layer(0).build(num_heads, head_size)

    def definition(self) -> MechanismConfig:
        """Return the list of every mechanism's definition."""
        return AlternateConfig(mechanisms=tuple(mechanism.definition() for mechanism in self.mechanisms))

    def within(self, pattern: Pattern) -> MechanismConfig:
        """Return the list of every mechanism within the pattern."""
        return AlternateConfig(mechanisms=tuple(mechanism.within(pattern) for mechanism in self.mechanisms))

    def cross(self, pattern: Pattern | None = None) -> MechanismConfig:
        """Return the list of every mechanism's cross-attention."""
        return AlternateConfig(mechanisms=tuple(mechanism.cross(pattern) for mechanism in self.mechanisms))

    @classmethod
    def examples(cls) -> tuple["AlternateConfig", ...]:
        whole, near = ({"kind": "softmax", "pattern": pattern} for pattern in (None, "Window(3)"))
        return (cls(mechanisms=(MechanismConfig.from_dict(near), MechanismConfig.from_dict(whole))),)
