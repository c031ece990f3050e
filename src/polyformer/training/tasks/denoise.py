"""Corrupted text that a decoder restores.

    kind               encoder reads                    decoder generates
    denoise            <bos> corrupted text <eos>       text <eos>, starting from <bos>
    span_corruption    The cat <0> the <1> .            <0> sat on <1> mat

The noise is redrawn in every epoch, and fixed for held-out text.

**denoise**: Lewis et al. 2020 (BART), section 2.2. Documents longer than a row are split.

**span_corruption**: Raffel et al. 2020 (T5), section 3.3.4. Documents are concatenated and split into texts
with inputs of exactly `row_length` tokens, so that batches have no padding. The last span always ends the
text, as in the released code: rows so short that they have one span lose their end. A tokenizer trained for
this task includes the sentinels.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.rows import Row
from polyformer.data.rows.masking import sentence_ends
from polyformer.data.rows.noising import (
    SENTINELS,
    NoiseConfig,
    add_sentinels,
    apply_noises,
    corrupt_spans,
    corrupted_lengths,
    pieces,
    sentinel_ids,
    span_counts,
    text_length,
)
from polyformer.nn.heads import LanguageModelConfig
from polyformer.training.tasks.base import Rows
from polyformer.training.tasks.text import (
    TextArchitecture,
    TextRows,
    TextTask,
    TextTaskConfig,
    TokenPredictions,
    required,
    starting_from_pad,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoisingConfig(TextTaskConfig):
    """Denoising (BART): reconstruct a text from a corrupted copy."""

    row_length: int = 128  # tokens of a text, including <bos> and <eos>
    noise: NoiseConfig = NoiseConfig()

    shortest: ClassVar[int] = 3
    kind: ClassVar[str] = "denoise"
    paper: ClassVar[str] = "Lewis et al. 2020, section 2.2"


class NoisyTexts(TextRows):
    """Rows <bos> text <eos> with noise; the labels are the original text."""

    config: DenoisingConfig
    corrupts_held_out = True

    def __init__(self, config: DenoisingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.bos, self.eos = required(tokenizer.bos_id, "<bos>"), required(tokenizer.eos_id, "<eos>")
        self.mask = required(tokenizer.mask_id, "<mask>")
        self.ends = sentence_ends(tokenizer) if config.noise.permute else None
        self.corrupt = self.add_noise

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return <bos> text <eos>, for every piece of `row_length` tokens."""
        encoded = self.tokenizer.encode_batch([row["text"] for row in rows])
        text_length = self.config.row_length - 2
        return [
            {"input_ids": np.array([self.bos, *ids[start : start + text_length], self.eos], np.int32)}
            for ids in encoded
            for start in range(0, len(ids), text_length)
        ]

    def add_noise(self, row: Row, generator: np.random.Generator) -> Row:
        """Add noise to the text, and use the original text as labels."""
        text = row["input_ids"][1:-1]
        noisy = apply_noises(text, generator, self.config.noise, mask_id=self.mask, end_ids=self.ends)
        # Empty spans may make a text longer than its row: its end is then truncated.
        ids = np.concatenate([[self.bos], noisy[: self.config.row_length - 2], [self.eos]])
        return {"input_ids": ids, "labels": row["input_ids"][1:]}


class Denoising(TextTask, config=DenoisingConfig):
    """Denoising, with metrics over the tokens of the whole text and its <eos>: loss, perplexity, accuracy."""

    def __init__(self, config: DenoisingConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=NoisyTexts(config, tokenizer),
            architecture=TextArchitecture(
                "encoder-decoder", LanguageModelConfig(), tokenizer, config.row_length
            ),
            metrics=TokenPredictions(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruptionConfig(TextTaskConfig):
    """Span corruption (T5): generate the spans that were removed from a text."""

    row_length: int = 128  # tokens of an input, including sentinels and <eos>
    density: float = 0.15  # fraction of removed tokens
    mean_span: float = 3.0  # mean length of a span, in tokens

    shortest: ClassVar[int] = 3
    kind: ClassVar[str] = "span_corruption"
    paper: ClassVar[str] = "Raffel et al. 2020, section 3.3.4"

    @property
    def longest_row(self) -> tuple[str, int]:
        """Return the length of a text before corruption."""
        return "the tokens of a text before it is corrupted", self.text_length

    @property
    def text_length(self) -> int:
        """Return the number of tokens of a text before corruption."""
        return text_length(self.row_length, self.density, self.mean_span)

    @property
    def spans(self) -> int:
        """Return the number of spans removed from a text."""
        return span_counts(self.text_length, self.density, self.mean_span)[1]

    def tokenizer(self, config: TokenizerConfig, rows: Rows) -> Tokenizer:
        """Return the tokenizer with a sentinel for every span."""
        return add_sentinels(super().tokenizer(config, rows), max(SENTINELS, self.spans))


class TextsWithoutSpans(TextRows):
    """Rows of texts with sentinels for spans; the spans are the labels."""

    config: SpanCorruptionConfig
    corrupts_held_out = True

    def __init__(self, config: SpanCorruptionConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.eos = required(tokenizer.eos_id, "<eos>")
        self.sentinels = sentinel_ids(tokenizer, config.spans)
        self.corrupt = self.remove_spans

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return texts of exactly `text_length` tokens, or a single shorter text."""
        texts = self.prepare_held_out(rows)
        shorter = len(texts) > 1 and len(texts[-1]["input_ids"]) < self.config.text_length
        return texts[:-1] if shorter else texts

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return the concatenated documents, split into `text_length` tokens; the last may be shorter."""
        encoded = self.tokenizer.encode_batch([row["text"] for row in rows])
        return [{"input_ids": text} for text in pieces(encoded, self.config.text_length)]

    def remove_spans(self, row: Row, generator: np.random.Generator) -> Row:
        """Replace each span by a sentinel, and use the spans as labels."""
        ids, labels = corrupt_spans(
            row["input_ids"],
            generator,
            sentinel_ids=self.sentinels,
            eos_id=self.eos,
            density=self.config.density,
            mean_span=self.config.mean_span,
        )
        return {**row, "input_ids": ids, "labels": labels}


class SpanCorruption(TextTask, config=SpanCorruptionConfig):
    """Span corruption, with metrics over the target tokens, including sentinels and <eos>.

    The metrics are loss, perplexity and accuracy. As in T5, the decoder starts from <pad> if the tokenizer
    has no <bos>.
    """

    def __init__(self, config: SpanCorruptionConfig, tokenizer: Tokenizer):
        longest = max(corrupted_lengths(config.text_length, config.density, config.mean_span))
        super().__init__(
            config,
            tokenizer,
            rows=TextsWithoutSpans(config, tokenizer),
            architecture=TextArchitecture(
                "encoder-decoder", LanguageModelConfig(), tokenizer, longest, change=starting_from_pad
            ),
            metrics=TokenPredictions(),
        )
