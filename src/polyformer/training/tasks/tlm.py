"""Translation language modelling: predict masked tokens of a text joined to its translation.

A row is <cls> source <sep> <cls> target <sep>, with tokens masked on both sides; positions restart in the
second language, and every token has a language id. Relative position schemes do not restart. Longer pairs
are truncated. Lample and Conneau 2019 (XLM), section 3.4.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from polyformer.core.ranges import NonNegativeInt
from polyformer.data import MaskingConfig
from polyformer.data.rows.batching import Row
from polyformer.data.rows.pairs import translation_row
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import HeadConfig, MaskedConfig
from polyformer.training.tasks.masking import MaskingTask, TokenPrediction
from polyformer.training.tasks.text import TextTaskConfig, with_tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationModellingConfig(TextTaskConfig):
    """Translation language model (XLM): predict masked tokens of a text joined to its translation."""

    max_length: int = 256  # tokens of a pair, including its four special tokens
    masking: MaskingConfig = MaskingConfig()
    languages: tuple[NonNegativeInt, NonNegativeInt] = (0, 1)  # of source and target, in the model's table

    needs: ClassVar[tuple[str, ...]] = ("source", "target")
    text_columns: ClassVar[tuple[str, ...]] = ("source", "target")
    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 6
    kind: ClassVar[str] = "tlm"
    paper: ClassVar[str] = "Lample and Conneau 2019, section 3.4"


class TranslationModelling(TokenPrediction, MaskingTask, config=TranslationModellingConfig):
    """Translation language modelling, with metrics over the masked tokens.

    The metrics are loss (nats per token), perplexity exp(loss) and accuracy.
    """

    config: TranslationModellingConfig
    head: HeadConfig = MaskedConfig()

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """Return the config with an embedding for at least the two languages."""
        return with_tables(super().adapt(config), num_languages=max(self.config.languages) + 1)

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return each pair as one row, truncated to `max_length` tokens."""
        sources, targets = (
            self.tokenizer.encode_batch([row[side] for row in rows]) for side in self.config.needs
        )
        ends = {"begin_id": self.cls, "end_id": self.sep}
        options = {"languages": self.config.languages, "length": self.config.max_length}
        return [translation_row(*pair, **ends, **options) for pair in zip(sources, targets)]
