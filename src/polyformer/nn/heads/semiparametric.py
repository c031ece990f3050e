"""A language model that uses the tokens that followed similar contexts in a text: SPALM.

    m_t = sum_i softmax_i(w_i . h_t) w_i          w_i: the vectors of the neighbours' tokens, rows of W
    g_t = sigmoid(w_g . h_t)
    z_t = (1 - g_t) m_t + g_t h_t
    p(next | text) = softmax(W z_t)               W: the token table, tied

The neighbours of token t are the tokens that followed the k contexts in a datastore that are nearest to the
context of t. A frozen model finds them (`polyformer.applications.retrieval.neighbours`), and with `memory:
recurrent` the decoder is the paper's. Gradients reach h, w_g and W, also through the w_i. The distances of
the neighbours are not used. A missing neighbour (-1) is left out of the softmax, and if all are missing z_t =
h_t: the model without a datastore is a plain language model. Yogatama et al. 2021, section 3.

Cost: k rows of W for each token, O(k E) operations and memory.
"""

import dataclasses
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.ops.int8 import as_matrix
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.softmax import softmax
from polyformer.nn.heads.base import HeadInput, HeadShape
from polyformer.nn.heads.vocabulary import LanguageModelConfig, LanguageModelHead
from polyformer.nn.stack import AdaptiveEmbedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class SemiparametricConfig(LanguageModelConfig):
    """Semiparametric head: a gate mixes hidden states with tokens that followed similar contexts.

    SPALM: `gate` is a number for each token, as in the paper, or a number for each of its dimensions.
    """

    gate: Literal["scalar", "vector"] = "scalar"

    kind: ClassVar[str] = "semiparametric"
    paper: ClassVar[str] = "Yogatama et al. 2021 (SPALM), section 3.3"

    @classmethod
    def examples(cls) -> tuple["SemiparametricConfig", ...]:
        return cls(), cls(gate="vector", label_smoothing=0.1, bias=True)

    def build(self, shape: HeadShape) -> "SemiparametricHead":
        return SemiparametricHead(shape, self)


class SemiparametricHead(LanguageModelHead):
    """A head that predicts the next token from the hidden state and the neighbours' tokens."""

    reads_neighbours = True
    supports_context_parallel = False
    supports_vocabulary_parallel = False  # it looks up rows of any token

    def __init__(self, shape: HeadShape, config: SemiparametricConfig):
        super().__init__(shape, config)
        self.gate = Linear(shape.hidden_size, 1 if config.gate == "scalar" else shape.hidden_size, bias=False)

    def states(self, inputs: HeadInput, bias: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """Return z [B, T, E]. bias: [B, T, k], added to the scores w_i . h_t. factor: of m_t."""
        h, near = inputs.hidden, inputs.neighbour_ids
        if near is None:
            return h
        table = inputs.table if self.weight is None else self.weight
        assert not isinstance(table, AdaptiveEmbedding)
        present = near >= 0
        # [B, T, k, E]; -1 looks up row 0, which `present` masks below.
        vectors = F.embedding(near.clamp_min(0), as_matrix(table))
        scores = (vectors @ h.unsqueeze(-1)).squeeze(-1)
        weights, _ = softmax(scores if bias is None else scores + bias, present)
        # m_t, the mean of the neighbours' vectors with the softmax weights of the equation.
        pooled = factor * (weights.unsqueeze(-2) @ vectors).squeeze(-2)
        gate = torch.sigmoid(self.gate(h))
        return torch.where(present.any(-1, keepdim=True), (1 - gate) * pooled + gate * h, h)
