"""Rows of a text, or of a text and its pair, between <cls> and <sep>, for a label or a number."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn

from polyformer.core.errors import quote
from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Corrupt, Row
from polyformer.training.tasks.pair_encoder import PairEncoder
from polyformer.training.tasks.text import EncoderTask, TextTaskConfig, required, too_long


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDropoutConfig(TextTaskConfig):
    """Options of tasks that drop tokens of the training texts."""

    token_dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.0  # of training tokens become <unk> or <mask>


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRowsConfig(TokenDropoutConfig):
    """Options of tasks with rows of a text, or of two texts."""

    max_length: int = 512  # tokens of a text, including <cls> and <sep>
    too_long: Literal["refuse", "cut"] = "refuse"  # handling of longer texts

    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 3


class TokenDropout(EncoderTask):
    """A task that replaces some tokens of the training texts, so that a model also learns from the others."""

    config: TokenDropoutConfig

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if config.token_dropout:
            token = tokenizer.mask_id if tokenizer.unk_id is None else tokenizer.unk_id
            self.dropped = required(token, "<unk> or <mask>")

    @property
    def corrupt(self) -> Corrupt | None:
        """Return a function that replaces `token_dropout` of the text tokens by <unk> or <mask>."""
        share = self.config.token_dropout
        if not share:
            return None

        def drop_tokens(row: Row, generator: np.random.Generator) -> Row:
            ids = np.array(row["input_ids"])
            inside = ids[1:-1]
            inside[(generator.random(len(inside)) < share) & (inside != self.sep)] = self.dropped
            return {**row, "input_ids": ids}

        return drop_tokens


class TextRows(TokenDropout):
    """A task with rows <cls> text <sep>."""

    config: TextRowsConfig

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cut = 0  # texts truncated since the last call of `encode_rows`

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return <cls> text <sep> for every text."""
        limit = self.config.max_length
        rows = [[self.cls, *ids, self.sep] for ids in self.tokenizer.encode_batch(texts)]
        for number, ids in enumerate(rows):
            if len(ids) > limit:
                self.count_cut(number, texts[number], len(ids))
                rows[number] = [*ids[: limit - 1], self.sep]
        return rows

    def count_cut(self, number: int, text: str, length: int) -> None:
        """Count a text that has to be truncated; raise `InputError` if truncation is not allowed."""
        if self.config.too_long == "refuse":
            raise too_long(f"text {number + 1} ({quote(text)})", length, self.config.max_length, "cut")
        self.cut += 1

    def encode_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return `inputs`, and note the number of truncated texts."""
        self.cut = 0
        encoded = self.inputs(rows)
        if self.cut:
            self.notes.append(f"{self.cut} of {len(rows)} texts are cut to {self.config.max_length} tokens")
        return encoded

    def inputs(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids of each row."""
        return [{"input_ids": ids} for ids in self.encode([row["text"] for row in rows])]

    @torch.no_grad()
    def logits(self, model: nn.Module, rows: Sequence[Row]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the numbers of some of the rows and their logits [rows, n]; rows need no label."""
        for numbers, batch in self.batched(model, self.encode_rows(rows)):
            yield numbers, model(**batch).logits.float().cpu()


class PairRows(TextRows):
    """A task with rows of two texts, joined by `PairEncoder`."""

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.joining = PairEncoder(tokenizer, self.cls, self.sep, config.max_length)
        self.token_types = self.joining.token_types

    def inputs(self, rows: Sequence[Row]) -> list[Row]:
        """Return the token ids of both texts, joined."""
        texts = [row["text"] for row in rows]
        joined, cut = self.joining.rows(texts, [row["pair"] for row in rows])
        for number, length in cut.items():
            self.count_cut(number, texts[number], length)
        return joined
