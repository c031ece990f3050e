"""Summarisation: write a short text of a long one; measured by ROUGE beside the first three sentences.

The encoder reads the first `max_length` tokens of the source, however long it is: a pattern of attention
(`model.encoder.attention Window(64) | Global(1)`) makes thousands of them cheap. Liu et al. 2018; ROUGE by
Lin 2004; the first three sentences, which are hard to beat, See et al. 2017, section 6.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from polyformer.core.errors import InputError
from polyformer.data import Tokenizer
from polyformer.data.batching import Row
from polyformer.data.rouge import rouge, scorer
from polyformer.data.summaries import lead
from polyformer.model import Transformer
from polyformer.tasks.base import Rows
from polyformer.tasks.workers import ALONE, Workers
from polyformer.tasks.writing import Writing, WritingConfig
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummarizationConfig(WritingConfig):
    """Write a short text of a long one."""

    max_length: int = 512  # tokens of a source, <eos> included; of a longer one the beginning is read
    max_summary: int = 96  # tokens of a summary, <eos> included; of a longer one the beginning is learnt

    kind: ClassVar[str] = "summarize"
    paper: ClassVar[str] = "Liu et al. 2018; See et al. 2017"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, max_summary=self.max_summary)
        if self.max_summary > self.max_length:
            raise InputError(
                f"max_summary: expected at most max_length, {self.max_length}, got {self.max_summary}"
            )

    def build(self, tokenizer: Tokenizer) -> "Summarization":
        """The task with `tokenizer`."""
        return Summarization(self, tokenizer)


class Summarization(Writing):
    """Metrics: loss (nats a target token) and perplexity; `finish` adds rouge1, rouge2 and rougeL (F1, 0 to
    100) of beam search, and as lead3_... those of the first three sentences of the sources.
    """

    config: SummarizationConfig

    def __init__(self, config: SummarizationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        scorer()  # refused now where it is missing, not when the training has ended

    def room(self, width: int) -> int:
        """`max_summary`."""
        return self.config.max_summary

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """The first `max_length` tokens of each text, <eos> the last of them."""
        limit = self.config.max_length - 1
        return [[*ids[:limit], self.eos] for ids in self.tokenizer.encode_batch(texts)]

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Each summary; of a longer one the first `max_summary` tokens, without an end."""
        return [ids[: self.config.max_summary] for ids in super().encode_targets(texts)]

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Pairs, with a note of how many sources and summaries are cut."""
        prepared = self.prepare_held_out(rows)
        limits = {
            "sources": ("source", self.config.max_length),
            "summaries": ("target", self.config.max_summary),
        }
        for name, (column, limit) in limits.items():
            sizes = [len(ids) + 1 for ids in self.tokenizer.encode_batch([row[column] for row in rows])]
            if cut := sum(size > limit for size in sizes):
                self.notes.append(f"{cut} of {len(rows)} {name} are cut to {limit} tokens")
        return prepared

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = ALONE) -> dict[str, float]:
        """ROUGE of the summaries of `rows`, and of the first three sentences of each source."""
        assert isinstance(model, Transformer)
        pairs = list(rows)
        targets = [pair["target"] for pair in pairs]
        scores = rouge(self.translated(model, [pair["source"] for pair in pairs], workers), targets)
        first = rouge([lead(pair["source"]) for pair in pairs], targets)
        return {**scores, **{f"lead3_{name}": value for name, value in first.items()}}
