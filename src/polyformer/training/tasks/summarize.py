"""Summarization: generate a short text from a long text; measured by ROUGE, next to a baseline.

The encoder reads the first `max_length` tokens of the source: an attention pattern
(`model.encoder.attention Window(64) | Global(1)`) makes thousands of tokens cheap. With `by_sentence` it
reads <cls> sentence <sep> for each sentence that fits, with token types 0 and 1 in turn: Liu and Lapata 2019
(BertSum), section 3.1.

Liu et al. 2018; ROUGE by Lin 2004; the baseline of the first three sentences, which is hard to beat, See et
al. 2017, section 6.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated, ClassVar

from annotated_types import Ge
from torch import nn

from polyformer.core.errors import InputError
from polyformer.data import Tokenizer
from polyformer.data.formats.questions_and_summaries import lead, rouge, scorer
from polyformer.data.rows.batching import Row
from polyformer.data.rows.structured import sentence_row
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.training.tasks.base import SINGLE_PROCESS, Rows, Workers
from polyformer.training.tasks.seq2seq import SequenceToSequenceConfig, TruncatingSequenceToSequence
from polyformer.training.tasks.text import required, with_tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummarizationConfig(SequenceToSequenceConfig):
    """Summarization: generate a short text from a long text."""

    max_length: int = 512  # tokens of a source, including <eos>; longer sources are truncated
    max_summary: Annotated[int, Ge(2)] = 96  # tokens of a summary, including <eos>; longer ones are cut
    by_sentence: bool = False  # mark every sentence of a source by <cls>, <sep> and alternating token types

    kind: ClassVar[str] = "summarize"
    paper: ClassVar[str] = "Liu et al. 2018; See et al. 2017"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_summary > self.max_length:
            raise InputError(
                f"max_summary: expected at most max_length, {self.max_length}, got {self.max_summary}"
            )


class Summarization(TruncatingSequenceToSequence, config=SummarizationConfig):
    """Summarization, with metrics: loss (nats per target token) and perplexity.

    `finish` adds rouge1, rouge2 and rougeL (F1, 0 to 100) of beam search, and lead3_... of the first three
    sentences of the sources.
    """

    config: SummarizationConfig
    target_option = "max_summary"

    def __init__(self, config: SummarizationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        scorer()  # raises now if it is missing, instead of at the end of training
        if config.by_sentence:
            required(tokenizer.cls_id, "<cls>")
            required(tokenizer.sep_id, "<sep>")

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """Return the config as for other tasks, with two token types if they mark sentences."""
        return with_tables(super().adapt(config), type_vocab_size=2 if self.config.by_sentence else 0)

    def source_rows(self, texts: Sequence[str]) -> list[Row]:
        """Return the tokens of each text, or of its sentences with their token types."""
        if not self.config.by_sentence:
            return super().source_rows(texts)
        return [sentence_row(self.tokenizer, text, self.config.max_length)[1] for text in texts]

    def source_sizes(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text before it is truncated."""
        if not self.config.by_sentence:
            return [len(ids) + 1 for ids in self.tokenizer.encode_batch(texts)]
        return [len(sentence_row(self.tokenizer, text, sys.maxsize)[1]["input_ids"]) for text in texts]

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return pairs, and note the number of truncated sources and summaries."""
        prepared = self.prepare_held_out(rows)
        targets = self.tokenizer.encode_batch([row["target"] for row in rows])
        sizes = {
            "sources": (self.source_sizes([row["source"] for row in rows]), self.config.max_length),
            "summaries": ([len(ids) + 1 for ids in targets], self.config.max_summary),
        }
        for name, (lengths, limit) in sizes.items():
            if cut := sum(length > limit for length in lengths):
                self.notes.append(f"{cut} of {len(rows)} {name} are cut to {limit} tokens")
        return prepared

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return ROUGE of the summaries of `rows`, and of the first three sentences of each source."""
        assert isinstance(model, Transformer)
        pairs = list(rows)
        targets = [pair["target"] for pair in pairs]
        scores = rouge(self.translated(model, [pair["source"] for pair in pairs], workers), targets)
        first = rouge([lead(pair["source"]) for pair in pairs], targets)
        return {**scores, **{f"lead3_{name}": value for name, value in first.items()}}
