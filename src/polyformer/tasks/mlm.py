"""Masked language modelling: guess the tokens that were hidden. Devlin et al. 2019, section 3.1, task 1.

Every document is <cls> text <sep>; documents are packed into rows and do not see one another, or each has
rows of its own, for attention that cannot keep packed documents apart. Which tokens are hidden is drawn anew
in every epoch (Liu et al. 2019, section 4.1) unless `masking` is static; in held-out text once for all.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

from polyformer.data import MaskingConfig, Tokenizer
from polyformer.data.batching import Row
from polyformer.heads import HeadConfig, MaskedConfig
from polyformer.tasks.base import (
    GuessingTask,
    MaskingTask,
    Rows,
    TaskConfig,
    check_room,
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
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, row_length=self.row_length)
        check_room(self.batch_tokens, "row_length", self.row_length)

    def texts(self, rows: Rows) -> Iterator[str]:
        return (row["text"] for row in rows)

    def build(self, tokenizer: Tokenizer) -> "MaskedModelling":
        return MaskedModelling(self, tokenizer)


class MaskedModelling(GuessingTask, MaskingTask):
    """Metrics over the tokens to be guessed: loss (nats a token), perplexity exp(loss), accuracy."""

    head: HeadConfig = MaskedConfig()

    def __init__(self, config: MaskedModellingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.config = config

    @property
    def packs(self) -> bool:
        return self.config.packed

    @property
    def positions(self) -> int:
        return self.config.row_length

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        return self.documents(rows, self.config.row_length, self.config.packed)
