"""A rule that uses the prediction itself, restricted to the tokens that are predicted most often.

The softmax response costs the product with the vocabulary matrix at every exit, which in a small model is the
cost of several layers. A shortlist V' of the vocabulary reduces this to |V'| / |V|,

    p = softmax(W' x + b')      confidence p_(1) - p_(2)

with x the head's input at the exit, and W' [|V'|, E] and b' the rows of its output matrix and bias for V'.
The tokens of V' are determined from a text: `polyformer convert --fit` (calibration/fitting.py). Until then
both are 0, and no token leaves. The rule can be overconfident about predictions outside the shortlist;
calibration accounts for this.
"""

import dataclasses
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from polyformer.nn.depth.exits.base import Candidates, ExitRule, ExitRuleConfig, top_gap


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortlistConfig(ExitRuleConfig):
    """Shortlist confidence: the gap between the two likeliest tokens of a small vocabulary.

    `tokens`: the maximum size of the shortlist.
    """

    tokens: Annotated[int, Ge(2)] = 1024

    kind: ClassVar[str] = "shortlist"
    paper: ClassVar[str] = "Schuster et al. 2022 (CALM), section 3.5, over part of the vocabulary"

    def build(self, hidden_size: int, exits: int) -> "Shortlist":
        """Return the rule with zero rows, to be filled later."""
        return Shortlist(self, hidden_size)


class Shortlist(ExitRule):
    """The confidence p_(1) - p_(2) from `rows` [|V'|, E] and `bias` [|V'|], which are not trained."""

    rows: Tensor
    bias: Tensor

    def __init__(self, config: ShortlistConfig, hidden_size: int):
        super().__init__()
        self.register_buffer("rows", torch.zeros(config.tokens, hidden_size))
        self.register_buffer("bias", torch.zeros(config.tokens))

    def confidence(self, candidates: Candidates) -> Tensor:
        """Return the gap for the head's input."""
        hidden = candidates.hidden[0]
        logits = F.linear(hidden, self.rows.to(hidden.dtype), self.bias.to(hidden.dtype))
        # A softmax over |V'| tokens only, which overestimates probabilities.
        return top_gap(logits)
