"""Replaced-token detection: classify which tokens were replaced. Clark et al. 2020 (ELECTRA), section 2.

    logit_t = w . act(W h_t + b) + c;    the loss is the binary cross-entropy of sigmoid(logit_t)

The mean is over all real tokens, while masked language modelling learns only from 15 % of them.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.host_values import IGNORED, check_labels
from polyformer.core.ops.activations import ActivationName, activation
from polyformer.core.ops.linear import ExactLinear, Linear
from polyformer.nn.heads.base import Head, HeadConfig, HeadInput, HeadOutput, HeadShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectConfig(HeadConfig):
    """Replaced-token detection head: a logit for every token.

    A layer with an activation, and a logit for every token: above 0 if the token was replaced.
    """

    activation: ActivationName = "gelu"

    kind: ClassVar[str] = "detect"
    paper: ClassVar[str] = "Clark et al. 2020, section 2"

    def build(self, shape: HeadShape) -> "Detect":
        return Detect(shape.hidden_size, self)

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """Return zeros and ones [B, T]."""
        return torch.randint(2, (rows, length))


class Detect(Head):
    """A head with labels [B, T], 1 for replaced tokens, 0 for others, -100 for none; predictions [B, T]."""

    supports_context_parallel = True
    supports_vocabulary_parallel = True

    def __init__(self, hidden_size: int, config: DetectConfig):
        super().__init__()
        self.activation = activation(config.activation)
        self.dense = Linear(hidden_size, hidden_size)
        self.output = ExactLinear(hidden_size, 1)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Compute logit_t = w . act(W h_t + b) + c."""
        hidden = self.activation(self.dense(inputs.hidden))
        # A sum, as the last bits of BLAS's product with a vector depend on the vector's memory address.
        logits = (hidden * self.output.weight.squeeze(0)).sum(-1) + self.output.bias
        return None if labels is None else self._loss(logits, labels, inputs.mask), lambda: logits

    def _loss(self, logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        check_labels(labels, logits.shape, 2)
        # Original tokens have a label too, so that every token trains the model.
        labelled = labels != IGNORED if mask is None else (labels != IGNORED) & mask
        weight = labelled.to(logits.dtype)
        targets = labels.clamp_min(0).to(logits.dtype)
        total = F.binary_cross_entropy_with_logits(logits, targets, weight, reduction="sum")
        return total / weight.sum().clamp_min(1)
