"""Layers that take turns: layer l has feed-forward l, beginning again where there are fewer than layers.

Experts in every other layer, for one (Lepikhin et al. 2021, section 2.1).
"""

import dataclasses
from typing import ClassVar

from polyformer.core.errors import InputError
from polyformer.feedforward.base import FeedForward, FeedForwardConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlternateFeedForwardConfig(FeedForwardConfig):
    """`feedforwards`: one for each layer in turn."""

    feedforwards: tuple[FeedForwardConfig, ...]

    kind: ClassVar[str] = "alternate"
    paper: ClassVar[str] = "Lepikhin et al. 2021 (GShard), section 2.1"

    def __post_init__(self) -> None:
        if not self.feedforwards:
            raise InputError("feedforwards: expected 1 feed-forward or more, got none")
        if not all(feedforward.tokenwise for feedforward in self.feedforwards):
            object.__setattr__(self, "tokenwise", False)

    def at(self, layer: int) -> FeedForwardConfig:
        """Number `layer` modulo how many there are."""
        return self.feedforwards[layer % len(self.feedforwards)].at(layer)

    def build(self, hidden_size: int) -> FeedForward:
        """Outside a stack there is one layer, the first."""
        return self.at(0).build(hidden_size)

    @classmethod
    def examples(cls) -> tuple["AlternateFeedForwardConfig", ...]:
        """Dense and gated in turn."""
        return (cls(feedforwards=tuple(map(FeedForwardConfig.from_dict, ("dense", "gated")))),)
