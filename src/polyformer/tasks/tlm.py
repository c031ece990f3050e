"""Translation language modelling: guess hidden tokens of a text that stands beside its translation.

A row is <cls> source <sep> <cls> target <sep>, with tokens hidden on both sides; positions begin anew in the
second language, and every token carries its language. Schemes that see distances alone count on. Longer pairs
are cut. Lample and Conneau 2019 (XLM), section 3.4.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

from polyformer.architecture import ModelConfig
from polyformer.core.errors import InputError
from polyformer.data import MaskingConfig, Tokenizer
from polyformer.data.batching import Row
from polyformer.data.translation_pairs import translation_row
from polyformer.heads import HeadConfig, MaskedConfig
from polyformer.tasks.base import (
    GuessingTask,
    MaskingTask,
    Rows,
    TaskConfig,
    check_room,
    with_tables,
)
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationModellingConfig(TaskConfig):
    """Guess hidden tokens of a text and of its translation, side by side."""

    max_length: int = 256  # tokens of a pair, its four marks included
    masking: MaskingConfig = MaskingConfig()
    languages: tuple[int, int] = (0, 1)  # of source and target, in the model's table

    needs: ClassVar[tuple[str, ...]] = ("source", "target")
    kind: ClassVar[str] = "tlm"
    paper: ClassVar[str] = "Lample and Conneau 2019, section 3.4"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(6, max_length=self.max_length)
        check_room(self.batch_tokens, "max_length", self.max_length)
        if min(self.languages) < 0:
            raise InputError(f"languages: expected two numbers from 0 on, got {self.languages}")

    def texts(self, rows: Rows) -> Iterator[str]:
        return (row[side] for row in rows for side in self.needs)

    def build(self, tokenizer: Tokenizer) -> "TranslationModelling":
        return TranslationModelling(self, tokenizer)


class TranslationModelling(GuessingTask, MaskingTask):
    """Metrics over the tokens to be guessed: loss (nats a token), perplexity exp(loss), accuracy."""

    head: HeadConfig = MaskedConfig()

    def __init__(self, config: TranslationModellingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.config = config

    @property
    def positions(self) -> int:
        return self.config.max_length

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """The model with a vector for each of the two languages, and more where it has them."""
        return with_tables(super().adapt(config), num_languages=max(self.config.languages) + 1)

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        sources, targets = (
            self.tokenizer.encode_batch([row[side] for row in rows]) for side in self.config.needs
        )
        marks = {"begin_id": self.cls, "end_id": self.sep}
        options = {"languages": self.config.languages, "length": self.config.max_length}
        return [translation_row(*pair, **marks, **options) for pair in zip(sources, targets)]
