"""Attention directly from its equation: the reference in the tests of every other backend.

softmax(score_mod(Q K^T * scale + relative terms), over the keys that the pattern allows) V
"""

from torch import Tensor

from polyformer.attention.functional.dense_pairs import DensePairs
from polyformer.attention.functional.request import Request
from polyformer.core.ops.layers import dropout
from polyformer.core.ops.softmax import softmax


def refuses(request: Request) -> str | None:
    """Return None: this backend runs every request."""
    return None


def run(request: Request) -> tuple[Tensor, Tensor]:
    """Return output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq]; time and memory are Tq x Tk."""
    pairs = DensePairs.of(request)
    probabilities, lse = softmax(pairs.scores, pairs.allowed)
    return pairs.mix(dropout(probabilities, request.dropout)), lse
