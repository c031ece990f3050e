"""The scores of an ensemble: the mean of the probabilities of several language models."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.core.host_values import IGNORED, next_labels
from polyformer.training.recipes import Run
from polyformer_lab.cells import Cell, Row, measurement, resumed


class Ensemble(nn.Module):
    """Several decoders as one, for a loss over held-out rows."""

    def __init__(self, models: Sequence[nn.Module]):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, labels: Tensor, **batch: Any) -> SimpleNamespace:
        """Return the mean loss over the next tokens of `labels` [B, T]."""
        targets = next_labels(labels, batch.get("document_ids"))
        log_p = torch.stack([model(**batch).logits.log_softmax(-1) for model in self.models])
        mixed = torch.logsumexp(log_p, 0) - torch.tensor(float(len(self.models))).log()
        nll = -mixed.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return SimpleNamespace(loss=nll[targets != IGNORED].mean())


@measurement()
def ensemble(cell: Cell, runs: Sequence[str]) -> Row:
    """Return the validation scores of the mean of the probabilities of finished runs of one task."""
    fitted = [resumed(Run.open(Path(folder)).recipe, Path(folder)) for folder in runs]
    task, held = fitted[0].task, fitted[0].splits.validation
    assert held is not None
    scores = task.measure(Ensemble([own.model for own in fitted]).eval(), task.held_out(held))
    return {f"validation.{name}": value for name, value in scores.items()}
