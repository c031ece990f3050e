"""Alternating feed-forwards: layer l has feed-forward l of a list, which repeats if there are more layers.

An example is experts in every second layer (Lepikhin et al. 2021, section 2.1).
"""

import dataclasses
from typing import ClassVar

from polyformer.core.errors import InputError
from polyformer.nn.feedforward.base import FeedForward, FeedForwardConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlternateFeedForwardConfig(FeedForwardConfig):
    """Alternating feed-forwards: each layer has the next feed-forward of a list, which repeats.

    `feedforwards`: the feed-forwards of the layers in turn.
    """

    feedforwards: tuple[FeedForwardConfig, ...]

    kind: ClassVar[str] = "alternate"
    paper: ClassVar[str] = "Lepikhin et al. 2021 (GShard), section 2.1"

    def __post_init__(self) -> None:
        if not self.feedforwards:
            raise InputError("feedforwards: expected 1 feed-forward or more, got none")
        if not all(feedforward.tokenwise for feedforward in self.feedforwards):
            object.__setattr__(self, "tokenwise", False)

    def for_layer(self, layer: int) -> FeedForwardConfig:
        """Return the feed-forward with the index `layer` modulo their number."""
        return self.feedforwards[layer % len(self.feedforwards)].for_layer(layer)

    def build(self, hidden_size: int) -> FeedForward:
        """Return the module of the first layer: outside a stack there is only this layer."""
        return self.for_layer(0).build(hidden_size)

    @classmethod
    def examples(cls) -> tuple["AlternateFeedForwardConfig", ...]:
        return (cls(feedforwards=tuple(map(FeedForwardConfig.from_dict, ("dense", "gated")))),)
