"""Translation: generate the target of a source; measured by BLEU on plain text.

Vaswani et al. 2017, sections 5.1 and 6.1; see `polyformer.training.tasks.seq2seq`.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from torch import nn

from polyformer.core.errors import quote
from polyformer.data.rows.batching import Row
from polyformer.models.architectures import Transformer
from polyformer.training.tasks.base import SINGLE_PROCESS, Rows, Workers
from polyformer.training.tasks.seq2seq import SequenceToSequence, SequenceToSequenceConfig
from polyformer.training.tasks.text import too_long

EXTRA_TOKENS = (
    50  # maximum tokens of a translation beyond its source length (Vaswani et al. 2017, section 6.1)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationConfig(SequenceToSequenceConfig):
    """Translation: generate the target text of a source text."""

    too_long: Literal["refuse", "drop"] = "refuse"  # handling of longer training pairs

    kind: ClassVar[str] = "translate"
    paper: ClassVar[str] = "Vaswani et al. 2017"


class Translation(SequenceToSequence, config=TranslationConfig):
    """Translation, with metrics: loss (nats per target token) and perplexity.

    `finish` adds bleu, sacrebleu's BLEU of beam search on plain text (0 to 100, its default tokenization).
    """

    config: TranslationConfig

    @property
    def positions(self) -> int:
        """Return the length of the longest generated target: `max_length` + `EXTRA_TOKENS`."""
        return self.config.max_length + EXTRA_TOKENS

    def max_generated(self, width: int) -> int:
        """Return `EXTRA_TOKENS` tokens more than the longest source of a batch."""
        return width + EXTRA_TOKENS

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return pairs of at most `max_length` tokens per side; longer pairs are dropped or refused."""
        prepared = self.prepare_held_out(rows)
        lengths = [max(len(row["input_ids"]), len(row["labels"])) for row in prepared]
        limit = self.config.max_length
        longest = int(np.argmax(lengths)) if lengths else 0
        if lengths and lengths[longest] > limit and self.config.too_long == "refuse":
            name = f"pair {longest + 1} ({quote(rows[longest]['source'])})"
            raise too_long(name, lengths[longest], limit, "drop")
        return [row for row, length in zip(prepared, lengths) if length <= limit]

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return bleu of the translations of `rows`."""
        import sacrebleu

        assert isinstance(model, Transformer)
        pairs = list(rows)
        translations = self.translated(model, [pair["source"] for pair in pairs], workers)
        return {"bleu": sacrebleu.corpus_bleu(translations, [[pair["target"] for pair in pairs]]).score}
