"""Span corruption: write the spans that were taken out of a text. Raffel et al. 2020 (T5), section 3.3.4.

Documents are laid end to end and cut into texts whose inputs have exactly `row_length` tokens, so that no
batch has padding. Which spans are taken is drawn anew in every epoch, and once for all in held-out text. A
span always ends the text, as in the released code: rows so short that they have one span lose their end. A
tokenizer trained for this task has the sentinels.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from polyformer.architecture import ModelConfig
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.batching import Corrupt, Row
from polyformer.data.sentinels import add_sentinels, sentinel_ids
from polyformer.data.spans import corrupt_spans, corrupted_lengths, span_counts, text_length
from polyformer.heads import HeadConfig, LanguageModelConfig
from polyformer.tasks.base import GuessingTask, Rows, TaskConfig, check_room, required
from polyformer.training.config import at_least

SENTINELS = 100  # as many as T5 has, or more where rows need them


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruptionConfig(TaskConfig):
    """Write the spans that are missing."""

    row_length: int = 128  # tokens of an input, sentinels and <eos> included
    density: float = 0.15  # of the tokens of a text, how many are taken out
    mean_span: float = 3.0  # tokens taken together

    needs: ClassVar[tuple[str, ...]] = ("text",)
    kind: ClassVar[str] = "span_corruption"
    paper: ClassVar[str] = "Raffel et al. 2020, section 3.3.4"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(3, row_length=self.row_length)
        check_room(self.batch_tokens, "the tokens of a text before it is corrupted", self.text_length)

    @property
    def text_length(self) -> int:
        """Tokens of a text before it is corrupted."""
        return text_length(self.row_length, self.density, self.mean_span)

    @property
    def spans(self) -> int:
        """Spans that are taken out of a text."""
        return span_counts(self.text_length, self.density, self.mean_span)[1]

    def texts(self, rows: Rows) -> Iterator[str]:
        return (row["text"] for row in rows)

    def tokenizer(self, config: TokenizerConfig, rows: Rows) -> Tokenizer:
        return add_sentinels(super().tokenizer(config, rows), max(SENTINELS, self.spans))

    def build(self, tokenizer: Tokenizer) -> "SpanCorruption":
        return SpanCorruption(self, tokenizer)


class SpanCorruption(GuessingTask):
    """Metrics over the target's tokens, its sentinels and <eos> among them: loss, perplexity, accuracy."""

    stacks = "encoder-decoder"
    head: HeadConfig = LanguageModelConfig()

    def __init__(self, config: SpanCorruptionConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.config = config
        self.eos = required(tokenizer.eos_id, "<eos>")
        self.sentinels = sentinel_ids(tokenizer, config.spans)

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """As in T5 what is written starts from <pad> where the tokenizer has no <bos>."""
        config = super().adapt(config)
        if config.special.bos is not None:
            return config
        start = required(config.special.pad, "<bos> or <pad>")
        return dataclasses.replace(config, special=dataclasses.replace(config.special, bos=start))

    @property
    def positions(self) -> int:
        config = self.config
        return max(corrupted_lengths(config.text_length, config.density, config.mean_span))

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        cut = self.prepare_held_out(rows)
        return cut[:-1] if len(cut) > 1 and len(cut[-1]["input_ids"]) < self.config.text_length else cut

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        encoded = self.tokenizer.encode_batch([row["text"] for row in rows])
        ids = np.array([token for document in encoded for token in document], np.int32)
        length = self.config.text_length
        cut = [ids[start : start + length] for start in range(0, len(ids), length)]
        return [{"input_ids": text} for text in cut if len(text) > 1]

    @property
    def corrupt(self) -> Corrupt:
        def take(row: Row, generator: np.random.Generator) -> Row:
            ids, labels = corrupt_spans(
                row["input_ids"],
                generator,
                sentinel_ids=self.sentinels,
                eos_id=self.eos,
                density=self.config.density,
                mean_span=self.config.mean_span,
            )
            return {**row, "input_ids": ids, "labels": labels}

        return take
