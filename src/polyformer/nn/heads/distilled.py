"""Two classifiers, for the class token and the distillation token. Touvron et al. 2021 (DeiT), section 4.

    c = W_c h_0 + b_c    d = W_d h_1 + b_d    logits = (c + d) / 2    loss = (loss of c + loss of d) / 2

The paper trains the second classifier on a teacher's predictions. Here both get the same labels.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.core.ops.layers import Dropout, pool, without_first
from polyformer.core.ops.linear import Linear
from polyformer.core.ranges import PositiveInt, Probability
from polyformer.nn.heads.base import Head, HeadConfig, HeadInput, HeadOutput, HeadShape, divide_layers
from polyformer.nn.heads.classification import Problem, label_loss, random_labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilledConfig(HeadConfig):
    """Distilled classifier: the mean of two classifiers, as in DeiT.

    The classifiers read a text's or image's first two tokens; `problem` as for the head `classify`.
    """

    num_labels: PositiveInt = 2
    dropout: Probability = 0.0
    problem: Problem | None = None

    kind: ClassVar[str] = "distilled"
    paper: ClassVar[str] = "Touvron et al. 2021 (DeiT), section 4"
    pooling: ClassVar[str] = "first"

    def build(self, shape: HeadShape) -> "Distilled":
        return Distilled(shape.hidden_size, self)

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """Return labels as for the head `classify`."""
        return random_labels(self.problem, rows, self.num_labels)


class Distilled(Head):
    """A head with labels as for the head `classify`; predictions [B, num_labels]."""

    supports_vocabulary_parallel = True

    def __init__(self, hidden_size: int, config: DistilledConfig):
        super().__init__()
        self.problem = config.problem
        self.dropout = Dropout(config.dropout)
        self.output = Linear(hidden_size, config.num_labels)
        self.distilled = Linear(hidden_size, config.num_labels)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Return the mean of both losses and the mean of both logits.

        They are computed from the first two real tokens; for a text with a single token, twice from this
        token.
        """
        # The distillation token comes second, after the class token.
        second = without_first(inputs.hidden, inputs.mask)
        pooled = pool(inputs.hidden, inputs.mask, "first"), pool(inputs.hidden, second, "first")
        scores = [layer(self.dropout(vector)) for layer, vector in zip((self.output, self.distilled), pooled)]
        logits = (scores[0] + scores[1]) / 2
        if labels is None:
            return None, lambda: logits
        losses = [label_loss(self.problem, score, labels) for score in scores]
        return (losses[0] + losses[1]) / 2, lambda: logits

    def divide_logits(self, temperature: float) -> bool:
        return divide_layers(temperature, self.output, self.distilled)
