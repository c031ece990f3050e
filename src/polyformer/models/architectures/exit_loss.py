"""Losses and predictions of a head for hidden states other than the stack's output, as at early exits."""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED
from polyformer.nn.heads import Head, HeadInput


@dataclasses.dataclass(frozen=True, eq=False)
class ExitLoss:
    """The per-exit loss: the head's loss with the hidden states of an exit as `hidden` of `inputs`."""

    head: Head
    inputs: HeadInput
    labels: Tensor

    @property
    def labelled(self) -> Tensor:
        """Return which tokens have a label, [B, T] bool."""
        return self.labels != IGNORED

    def loss(self, hidden: Tensor) -> Tensor:
        """Return the head's mean loss for hidden states [B, T, E]."""
        loss, _ = self.head(dataclasses.replace(self.inputs, hidden=hidden), self.labels)
        assert loss is not None
        return loss

    @torch.no_grad()
    def tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p of every label (0 without a label) and the likeliest prediction, [B, T] each."""
        _, predictions = self.head(dataclasses.replace(self.inputs, hidden=hidden), None)
        predicted = predictions()
        # Of tokens; a second prediction is of the whole text.
        logits = predicted[0] if isinstance(predicted, tuple) else predicted
        if not logits.shape[:-1] == self.labels.shape == hidden.shape[:2]:
            raise InputError(
                "depth.rule: it learns from predictions of tokens, and this head predicts one of the whole "
                "text; use the rule 'softmax' or 'saturation', or another depth"
            )
        # -100 is not a valid index for `gather`; the last line sets these terms to 0.
        labels = self.labels.masked_fill(~self.labelled, 0)
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()
        return (chosen - logits.float().logsumexp(-1)) * self.labelled, logits.argmax(-1)
