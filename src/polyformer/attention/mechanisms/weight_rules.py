"""Rules that make weights of the scores of all pairs, other than the softmax of each head.

    sigmoid         w_ij = sigmoid(s_ij + b)                       b = -log n_i, for the n_i keys that i sees
    talking_heads   w^g = sum_h A_hg softmax(sum_f B_fh s^f)^h     matrices B, A [H, H] of scores and weights

s_ij = q_i . k_j / sqrt(D) with the terms of the positions, and y_i = sum_j w_ij v_j. Each rule is its
definition over all pairs (`PairWeights`).
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.mechanisms.pair_weights import PairWeights, PairWeightsConfig
from polyformer.core.ops.softmax import shares


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidConfig(PairWeightsConfig):
    """Sigmoid attention: each key has a weight of its own, and keys do not compete.

    The default bias -log n makes the first weights of a query sum to about 1, whatever the length. Deviation:
    the paper's n is the length of the row; here it is the number of keys that a query sees, so that padding,
    other documents and later tokens do not change a text.

    `score_bias`: the number that is added to all scores; None for -log n.
    """

    score_bias: float | None = None

    kind: ClassVar[str] = "sigmoid"
    paper: ClassVar[str] = "Ramapuram et al. 2024, section 3"

    @classmethod
    def examples(cls) -> tuple["SigmoidConfig", ...]:
        """Return both biases."""
        return cls(), cls(score_bias=-1.5)

    def build(self, num_heads: int, head_size: int) -> "SigmoidAttention":
        return SigmoidAttention(self)


class SigmoidAttention(PairWeights):
    """The module of `SigmoidConfig`, without parameters."""

    config: SigmoidConfig

    def weights(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return sigmoid(s + b) [B, H, Tq, Tk]; the weights of a query need not sum to 1."""
        if self.config.score_bias is not None:
            return torch.sigmoid(scores + self.config.score_bias)
        n = allowed.sum(-1, keepdim=True).clamp_min(1)  # a query at padding sees no key
        return torch.sigmoid(scores - n.to(scores.dtype).log())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TalkingHeadsConfig(PairWeightsConfig):
    """Talking-heads attention: learned sums over heads of the scores, and of the weights after the softmax.

    Both matrices are the identity at first, which is softmax attention. Heads of different patterns: a pair
    that a head does not see adds nothing to other heads, and no sum makes it visible. Deviation: the three
    numbers of heads (of keys, of weights, of values) that the paper may choose are equal here.
    """

    kind: ClassVar[str] = "talking_heads"
    paper: ClassVar[str] = "Shazeer et al. 2020 (Talking-Heads Attention), section 4"

    def build(self, num_heads: int, head_size: int) -> "TalkingHeads":
        return TalkingHeads(self, num_heads)


class TalkingHeads(PairWeights):
    """The module of `TalkingHeadsConfig`: `of_scores` and `of_weights` [H, H], from head to head."""

    def __init__(self, config: TalkingHeadsConfig, num_heads: int):
        super().__init__(config)
        self.of_scores = nn.Parameter(torch.eye(num_heads))
        self.of_weights = nn.Parameter(torch.eye(num_heads))

    def weights(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return the mixed softmax of the mixed scores [B, H, Tq, Tk]."""
        mixed = _mixed(scores.masked_fill(~allowed, 0.0), self.of_scores)
        weights, _ = shares(mixed.masked_fill(~allowed, -torch.inf))
        return _mixed(weights, self.of_weights)


def _mixed(x: Tensor, matrix: Tensor) -> Tensor:
    """Return sum_h x^h matrix_hg [B, G, Tq, Tk] of x [B, H, Tq, Tk]."""
    return torch.einsum("bhij,hg->bgij", x, matrix.to(x.dtype))
