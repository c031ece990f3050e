"""A rule that reads the prediction itself, over the few tokens that are predicted most often.

The softmax response costs the vocabulary's product at every exit, in a small model as much as several layers.
Over a shortlist V' of the vocabulary it costs |V'| / |V| of that,

    p = softmax(W' x + b')      confidence p_(1) - p_(2)

with x what the head would read at the exit, and W' [|V'|, E] and b' what its output matrix and bias have for
V'. Which tokens these are says a text: `polyformer convert --fit` (calibration/fitting.py). Until then both
are 0, and no token leaves. A prediction outside the shortlist may look sure; calibration counts its cost.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.depth.exits.base import Candidates, ExitRule, ExitRuleConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortlistConfig(ExitRuleConfig):
    """`tokens`: of the vocabulary, at most."""

    tokens: int = 1024

    kind: ClassVar[str] = "shortlist"
    paper: ClassVar[str] = "Schuster et al. 2022 (CALM), section 3.5, over part of the vocabulary"

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise InputError(f"tokens: two are compared, expected 2 or more, got {self.tokens}")

    def build(self, hidden_size: int, exits: int) -> "Shortlist":
        """Rows to be filled."""
        return Shortlist(self, hidden_size)


class Shortlist(ExitRule):
    """p_(1) - p_(2) by `rows` [|V'|, E] and `bias` [|V'|], which nothing trains."""

    rows: Tensor
    bias: Tensor

    def __init__(self, config: ShortlistConfig, hidden_size: int):
        super().__init__()
        self.register_buffer("rows", torch.zeros(config.tokens, hidden_size))
        self.register_buffer("bias", torch.zeros(config.tokens))

    def confidence(self, candidates: Candidates) -> Tensor:
        """Of what the head would read."""
        hidden = candidates.hidden[0]
        logits = F.linear(hidden, self.rows.to(hidden.dtype), self.bias.to(hidden.dtype))
        likeliest = logits.float().softmax(-1).topk(2, -1).values
        return likeliest[:, 0] - likeliest[:, 1]
