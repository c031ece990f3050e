"""What tasks share that predict corrupted or masked tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from polyformer.data import Masking, MaskingConfig, Tokenizer, pack
from polyformer.data.batching import Batch, Corrupt, Row
from polyformer.tasks.metrics import prediction_metrics, prediction_totals
from polyformer.tasks.text import EncoderTask, TextTask, TextTaskConfig, required


class CorruptingTask(TextTask):
    """A task whose held-out text is corrupted like the training text, but once for all."""

    @property
    def corrupt_held_out(self) -> Corrupt | None:
        """As `corrupt`; held-out batches draw from the same seed every time."""
        return self.corrupt


class TokenPrediction(CorruptingTask):
    """A task measured at the labelled tokens: loss (nats a token), perplexity exp(loss), accuracy."""

    sums = 3

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """(sum of the loss, correct predictions, labels)."""
        return prediction_totals(model(**batch), batch["labels"])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """loss, perplexity and accuracy."""
        return prediction_metrics(*totals)


class MaskingTask(CorruptingTask, EncoderTask):
    """A task that masks tokens, as the `masking` of its configuration says."""

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.masking = Masking(config.masking, tokenizer, required(tokenizer.mask_id, "<mask>"))

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of evaluation, with static masking once for each of its masks."""
        return self.masking.copies(self.prepare_held_out(rows))

    @property
    def corrupt(self) -> Corrupt:
        """Mask tokens."""
        return self.masking.corrupt


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedDocumentsConfig(TextTaskConfig):
    """Options of tasks that mask tokens of documents."""

    row_length: int = 128  # tokens in a row
    packed: bool = True  # False: no row holds parts of two documents
    masking: MaskingConfig = MaskingConfig()


class MaskedDocuments(MaskingTask):
    """A task that masks tokens of documents, each <cls> text <sep>."""

    config: MaskedDocumentsConfig

    @property
    def packs(self) -> bool:
        """Whether the configuration packs documents."""
        return self.config.packed

    @property
    def frame(self) -> tuple[int, int] | None:
        """<cls> and <sep>, where documents are packed and masked anew in every epoch."""
        return (self.cls, self.sep) if self.packs and not self.config.masking.static_copies else None

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Rows of at most `row_length` tokens: documents packed end to end, or each in rows of its own."""
        length = self.config.row_length
        documents = [[self.cls, *ids, self.sep] for ids in self.encoded(rows)]
        if self.config.packed:
            return list(pack(documents, length, pad_id=self.collate.pad_id))
        pieces = (ids[start : start + length] for ids in documents for start in range(0, len(ids), length))
        return [{"input_ids": np.asarray(piece, np.int32)} for piece in pieces]
