"""Masked language modelling: guess the tokens that were hidden. Devlin et al. 2019, section 3.1, task 1.

Every document is <cls> text <sep>; documents are packed into rows and do not see one another, or each has
rows of its own, for attention that cannot keep packed documents apart. Which tokens are hidden is drawn anew
in every epoch (Liu et al. 2019, section 4.1), and once for all in held-out text.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, mask_tokens, pack
from polyformer.data.batching import Batch, Corrupt, Row
from polyformer.heads import HeadConfig, MaskedConfig
from polyformer.tasks.base import Rows, TaskConfig, TextTask, check_room, exp, required
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedModellingConfig(TaskConfig):
    """Guess hidden tokens."""

    row_length: int = 128  # tokens in a row
    packed: bool = True  # False: no row holds parts of two documents
    mask_share: float = 0.15  # of the tokens of a row, how many are to be guessed

    needs: ClassVar[tuple[str, ...]] = ("text",)
    kind: ClassVar[str] = "mlm"
    row: ClassVar[str] = "A3"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, row_length=self.row_length)
        if not 0 < self.mask_share <= 1:
            raise InputError(f"mask_share: expected a share in (0, 1], got {self.mask_share}")
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
        self.mask = required(tokenizer.mask_id, "<mask>")

    @property
    def positions(self) -> int:
        return self.config.row_length

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        encoded = self.tokenizer.encode_batch([row["text"] for row in rows])
        documents = [[self.cls, *ids, self.sep] for ids in encoded]
        length = self.config.row_length
        if self.config.packed:
            return list(pack(documents, length, pad_id=self.collate.pad_id))
        parts = (ids[start : start + length] for ids in documents for start in range(0, len(ids), length))
        return [{"input_ids": np.asarray(part, np.int32)} for part in parts]

    @property
    def corrupt(self) -> Corrupt:
        def hide(row: Row, generator: np.random.Generator) -> Row:
            ids, labels = mask_tokens(
                row["input_ids"],
                generator,
                mask_id=self.mask,
                ordinary_ids=self.tokenizer.ordinary_ids,
                share=self.config.mask_share,
            )
            return {**row, "input_ids": ids, "labels": labels}

        return hide

    @property
    def corrupt_held_out(self) -> Corrupt:
        return self.corrupt

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        output, labels = model(**batch), batch["labels"]
        tokens = self.weight(batch)
        right = (output.logits.argmax(-1) == labels).sum()  # never at -100, which is no token
        return torch.stack(
            [output.loss.double() * tokens, right.double(), output.loss.new_tensor(tokens).double()]
        )

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        nats, right, tokens = totals
        loss = nats / max(tokens, 1)
        return {"loss": loss, "perplexity": exp(loss), "accuracy": right / max(tokens, 1)}
