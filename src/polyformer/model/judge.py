"""What a head says of hidden states that are not the stack's output: of those at early exits."""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.labels import IGNORED
from polyformer.heads import Head, HeadInput


@dataclasses.dataclass(frozen=True, eq=False)
class HeadJudge:
    """`inputs`: of the stack's output; those of other states differ in `hidden` alone. labels: [B, T]."""

    head: Head
    inputs: HeadInput
    labels: Tensor

    @property
    def labelled(self) -> Tensor:
        """[B, T] bool: where there is something to predict."""
        return self.labels != IGNORED

    def loss(self, hidden: Tensor) -> Tensor:
        """The head's mean loss of hidden states [B, T, E]."""
        loss, _ = self.head(dataclasses.replace(self.inputs, hidden=hidden), self.labels)
        assert loss is not None
        return loss

    @torch.no_grad()
    def tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """log p of every label (0 where there is none), and the likeliest prediction, [B, T] each."""
        _, predictions = self.head(dataclasses.replace(self.inputs, hidden=hidden), None)
        predicted = predictions()
        logits = predicted[0] if isinstance(predicted, tuple) else predicted
        labels = self.labels.masked_fill(~self.labelled, 0)
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()
        return (chosen - logits.float().logsumexp(-1)) * self.labelled, logits.argmax(-1)
