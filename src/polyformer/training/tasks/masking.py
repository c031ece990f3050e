"""Shared parts of tasks that predict corrupted or masked tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from polyformer.data import Masking, MaskingConfig, Tokenizer, pack
from polyformer.data.rows.batching import Batch, Corrupt, Row
from polyformer.training.tasks.metrics import prediction_metrics, prediction_totals
from polyformer.training.tasks.text import EncoderTask, TextTask, TextTaskConfig, required


class TokenPrediction(TextTask):
    """A task measured at the labelled tokens: loss (nats per token), perplexity exp(loss), accuracy."""

    corrupts_held_out = True
    sums = 3

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return (sum of the loss, correct predictions, labels)."""
        return prediction_totals(model(**batch), batch["labels"])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return loss, perplexity and accuracy."""
        return prediction_metrics(*totals)


class MaskingTask(EncoderTask):
    """A task that masks tokens according to the `masking` of its configuration."""

    corrupts_held_out = True

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.masking = Masking(config.masking, tokenizer, required(tokenizer.mask_id, "<mask>"))

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of `prepare_held_out`; with static masking, one copy of them per mask."""
        return self.masking.copies(self.prepare_held_out(rows))

    @property
    def corrupt(self) -> Corrupt:
        """Return the function that masks tokens."""
        return self.masking.corrupt


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedDocumentsConfig(TextTaskConfig):
    """Options of tasks that mask tokens of documents."""

    row_length: int = 128  # tokens per row
    packed: bool = True  # False: no row contains parts of two documents
    masking: MaskingConfig = MaskingConfig()


class MaskedDocuments(MaskingTask):
    """A task that masks tokens of documents, each <cls> text <sep>."""

    config: MaskedDocumentsConfig

    @property
    def packs_documents(self) -> bool:
        """Return whether the configuration packs documents."""
        return self.config.packed

    @property
    def frame(self) -> tuple[int, int] | None:
        """Return <cls> and <sep> if documents are packed and masks are redrawn in every epoch, else None."""
        return (
            (self.cls, self.sep) if self.packs_documents and not self.config.masking.static_copies else None
        )

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows of at most `row_length` tokens: packed documents, or each in separate rows."""
        length = self.config.row_length
        documents = [[self.cls, *ids, self.sep] for ids in self.encoded(rows)]
        if self.config.packed:
            return list(pack(documents, length, pad_id=self.collate.pad_id))
        pieces = (ids[start : start + length] for ids in documents for start in range(0, len(ids), length))
        return [{"input_ids": np.asarray(piece, np.int32)} for piece in pieces]
