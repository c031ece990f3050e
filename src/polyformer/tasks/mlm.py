"""Masked language modelling: guess the tokens that were hidden. Devlin et al. 2019, section 3.1, task 1.

Every document is <cls> text <sep>; documents are packed into rows and do not see one another, or each has
rows of its own, for attention that cannot keep packed documents apart. Which tokens are hidden is drawn anew
in every epoch (Liu et al. 2019, section 4.1) unless `masking` is static; in held-out text once for all.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor, nn

from polyformer.data import Masking, MaskingConfig, Tokenizer
from polyformer.data.batching import Batch, Corrupt, Row
from polyformer.heads import HeadConfig, MaskedConfig
from polyformer.tasks.base import (
    Rows,
    TaskConfig,
    TextTask,
    check_room,
    document_rows,
    guesses,
    of_guesses,
    required,
)
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedModellingConfig(TaskConfig):
    """Guess hidden tokens."""

    row_length: int = 128  # tokens in a row
    packed: bool = True  # False: no row holds parts of two documents
    masking: MaskingConfig = MaskingConfig()

    needs: ClassVar[tuple[str, ...]] = ("text",)
    kind: ClassVar[str] = "mlm"
    row: ClassVar[str] = "A3"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, row_length=self.row_length)
        check_room(self.batch_tokens, "row_length", self.row_length)

    def texts(self, rows: Rows) -> Iterator[str]:
        return (row["text"] for row in rows)

    def build(self, tokenizer: Tokenizer) -> "MaskedModelling":
        return MaskedModelling(self, tokenizer)


class MaskedModelling(TextTask):
    """Metrics over the tokens to be guessed: loss (nats a token), perplexity exp(loss), accuracy."""

    stacks = "encoder"
    sums = 3
    head: HeadConfig = MaskedConfig()

    def __init__(self, config: MaskedModellingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.config = config
        self.cls, self.sep = required(tokenizer.cls_id, "<cls>"), required(tokenizer.sep_id, "<sep>")
        self.masking = Masking(config.masking, tokenizer, required(tokenizer.mask_id, "<mask>"))

    @property
    def positions(self) -> int:
        return self.config.row_length

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        return self.masking.copies(self.prepare_held_out(rows))

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        encoded = self.tokenizer.encode_batch([row["text"] for row in rows])
        documents = [[self.cls, *ids, self.sep] for ids in encoded]
        return document_rows(documents, self.config.row_length, self.config.packed, self.collate.pad_id)

    @property
    def corrupt(self) -> Corrupt:
        return self.masking.corrupt

    @property
    def corrupt_held_out(self) -> Corrupt:
        return self.corrupt

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        return guesses(model(**batch), batch["labels"])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        return of_guesses(*totals)
