"""The masked loss of encoders on equal rows, however they were pre-trained."""

import torch
import torch.nn.functional as F

from polyformer.models.architectures import Transformer
from polyformer.training.tasks import HeldOut, MaskedModellingConfig, TextTask
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.scores import scores


@measurement()
def masked_rows(cell: Cell, row_length: int) -> Row:
    """Return the loss on masked tokens of the validation text in packed rows, and the scores of the run.

    The rows and masks are equal for all cells of a seed with the same tokenizer, in nats per masked token.
    Rows have no token types.

    Args:
        cell: a pre-training with masked tokens, also with pairs of sentences.
        row_length: the number of tokens of a row.
    """
    fitted = cell.fitted
    assert isinstance(fitted.task, TextTask)
    task = MaskedModellingConfig(row_length=row_length, batch_tokens=4096).build(fitted.task.tokenizer)
    rows = task.held_out(fitted.splits.validation or [])
    return {"masked.loss": masked_loss(fitted.model.eval(), rows), **scores(cell)}


@torch.no_grad()
def masked_loss(model: Transformer, rows: HeldOut) -> float:
    """Return the mean nats per masked token."""
    nats, count = 0.0, 0
    for _, batch in rows.batches.epoch(0):
        labels = batch.pop("labels")
        masked = labels >= 0
        hidden = model(**batch).last_hidden_state[masked]
        logits = model.predictions(hidden.unsqueeze(0)).squeeze(0)
        nats += float(F.cross_entropy(logits, labels[masked], reduction="sum"))
        count += len(hidden)
    return nats / count
