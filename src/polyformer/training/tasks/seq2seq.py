"""A text from a text: translations and summaries.

    kind        model             reads                          writes
    translate   encoder-decoder   source <eos>                   target <eos>
    summarize   encoder-decoder   the first tokens of a source   a short target <eos>

The decoder starts from <bos>, or from <pad> if the tokenizer has none (T5). Batches contain pairs of similar
length, by token count.

**translate**: measured by BLEU on plain text. Vaswani et al. 2017, sections 5.1 and 6.1.

**summarize**: measured by ROUGE, next to a baseline. The encoder reads the first `max_length` tokens of the
source: an attention pattern (`model.encoder.attention Window(64) | Global(1)`) makes thousands of tokens
cheap. With `by_sentence` it reads <cls> sentence <sep> for each sentence that fits, with token types 0 and 1
in turn: Liu and Lapata 2019 (BertSum), section 3.1. Liu et al. 2018; ROUGE by Lin 2004; the baseline of the
first three sentences, which is hard to beat, See et al. 2017, section 6.
"""

import abc
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge
from torch import nn

from polyformer.core.errors import InputError, quote
from polyformer.data import Tokenizer
from polyformer.data.formats.published import lead, rouge, scorer
from polyformer.data.rows import Row
from polyformer.data.rows.structured import sentence_row
from polyformer.models.architectures import Transformer
from polyformer.models.generation import BeamConfig, GenerationConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.training.task import SINGLE_PROCESS, Workers
from polyformer.training.tasks.base import Rows
from polyformer.training.tasks.text import (
    Perplexity,
    TextArchitecture,
    TextRows,
    TextTask,
    TextTaskConfig,
    required,
    row_marks,
    starting_from_pad,
    too_long,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceToSequenceConfig(TextTaskConfig):
    """Options of sequence-to-sequence tasks."""

    max_length: int = 256  # tokens of the longer side of a training pair, including <eos>
    beam: BeamConfig = BeamConfig(num_beams=4)

    needs: ClassVar[tuple[str, ...]] = ("source", "target")
    text_columns: ClassVar[tuple[str, ...]] = ("source", "target")
    length_option: ClassVar[str] = "max_length"


class SourcesAndTargets(TextRows):
    """Rows of a source that the encoder reads and the target that the decoder generates, each with <eos>."""

    config: Any

    def __init__(self, config: SequenceToSequenceConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.eos = required(tokenizer.eos_id, "<eos>")

    @abc.abstractmethod
    def max_generated(self, width: int) -> int:
        """Return the maximum number of generated tokens for sources of at most `width` tokens."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text and <eos>."""
        return [[*ids, self.eos] for ids in self.tokenizer.encode_batch(texts)]

    def source_rows(self, texts: Sequence[str]) -> list[Row]:
        """Return all inputs of the encoder for each text."""
        return [{"input_ids": ids} for ids in self.encode(texts)]

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the decoder target of each text."""
        return self.encode(texts)

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return pairs of token ids."""
        sources = self.source_rows([row["source"] for row in rows])
        targets = self.encode_targets([row["target"] for row in rows])
        return [{**source, "labels": target} for source, target in zip(sources, targets)]


class TruncatedTexts(SourcesAndTargets):
    """Rows with sources of at most `max_length` tokens, and targets limited by `target_option`."""

    target_option: ClassVar[str] = "max_target"

    def max_generated(self, width: int) -> int:
        """Return the maximum length of a target."""
        return getattr(self.config, self.target_option)

    def source_rows(self, texts: Sequence[str]) -> list[Row]:
        """Return the first `max_length` tokens of each text, including a final <eos>."""
        limit = self.config.max_length - 1
        return [{"input_ids": [*ids[:limit], self.eos]} for ids in self.tokenizer.encode_batch(texts)]

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each target; a longer target is truncated, without <eos>."""
        return [ids[: self.max_generated(0)] for ids in super().encode_targets(texts)]


class SequenceToSequence(TextTask):
    """A sequence-to-sequence task, with metrics: loss (nats per target token) and perplexity."""

    config: Any
    rows: SourcesAndTargets
    command = "translate"

    def generation_settings(self) -> dict[str, Any]:
        """Return the settings of `translate` as in generation_config.json, for an exported model.

        The format lacks the normalization "gnmt" of beams: transformers divides by a power of the length.
        """
        settings: dict[str, Any] = {"max_new_tokens": self.rows.max_generated(self.config.max_length)}
        beam: BeamConfig = self.config.beam
        if beam.num_beams > 1:
            names = "num_beams", "length_penalty", "early_stopping"
            settings |= {name: getattr(beam, name) for name in names}
        return settings

    def translated(self, model: Transformer, texts: Sequence[str], workers: Workers) -> list[str]:
        """Return `translate` of all texts, computed in shares by the processes."""
        return workers.each(partial(self.translate, model), texts)

    def translate(
        self, model: Transformer, texts: Sequence[str], beam: BeamConfig | None = None
    ) -> list[str]:
        """Return the generated text for each text, by beam search, in batches of texts of similar length."""
        search: BeamConfig = beam or self.config.beam
        sources = self.rows.source_rows(texts)
        outputs = [""] * len(texts)
        for numbers, batch in self.rows.batched(model, sources, self.batch_tokens // search.num_beams):
            ids, mask, others = batch.pop("input_ids"), batch.pop("attention_mask"), dict[str, Any](batch)
            limit = self.rows.max_generated(ids.shape[1])
            config = GenerationConfig(max_new_tokens=limit, beam=search)
            generated = model.generate(ids, mask, config, **others)
            for number, text in zip(numbers, generated.texts(self.tokenizer.decode)):
                outputs[number] = text.strip()
        return outputs


def seq2seq_architecture(
    tokenizer: Tokenizer, positions: int, label_smoothing: float = 0.1, token_types: int = 0
) -> TextArchitecture:
    """Return an encoder and a decoder, which starts from <pad> if the tokenizer has no <bos>."""
    return TextArchitecture(
        "encoder-decoder",
        LanguageModelConfig(label_smoothing=label_smoothing),
        tokenizer,
        positions,
        tables={"type_vocab_size": token_types},
        change=starting_from_pad,
    )


EXTRA_TOKENS = (
    50  # maximum tokens of a translation beyond its source length (Vaswani et al. 2017, section 6.1)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationConfig(SequenceToSequenceConfig):
    """Translation: generate the target text of a source text."""

    too_long: Literal["refuse", "drop"] = "refuse"  # handling of longer training pairs

    kind: ClassVar[str] = "translate"
    paper: ClassVar[str] = "Vaswani et al. 2017"


class Translations(SourcesAndTargets):
    """Rows of a text and its translation."""

    config: TranslationConfig

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


class Translation(SequenceToSequence, config=TranslationConfig):
    """Translation, with metrics: loss (nats per target token) and perplexity.

    `finish` adds bleu, sacrebleu's BLEU of beam search on plain text (0 to 100, its default tokenization).
    """

    config: TranslationConfig

    def __init__(self, config: TranslationConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=Translations(config, tokenizer),
            architecture=seq2seq_architecture(tokenizer, config.max_length + EXTRA_TOKENS),
            metrics=Perplexity(),
        )

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return bleu of the translations of `rows`."""
        import sacrebleu

        assert isinstance(model, Transformer)
        pairs = list(rows)
        translations = self.translated(model, [pair["source"] for pair in pairs], workers)
        return {"bleu": sacrebleu.corpus_bleu(translations, [[pair["target"] for pair in pairs]]).score}


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


class Summaries(TruncatedTexts):
    """Rows of a text and its summary; with `by_sentence` the text is read by sentences."""

    config: SummarizationConfig
    target_option = "max_summary"

    def __init__(self, config: SummarizationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        scorer()  # raises now if it is missing, instead of at the end of training
        if config.by_sentence:
            row_marks(tokenizer)

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


class Summarization(SequenceToSequence, config=SummarizationConfig):
    """Summarization, with metrics: loss (nats per target token) and perplexity.

    `finish` adds rouge1, rouge2 and rougeL (F1, 0 to 100) of beam search, and lead3_... of the first three
    sentences of the sources.
    """

    config: SummarizationConfig
    rows: Summaries

    def __init__(self, config: SummarizationConfig, tokenizer: Tokenizer):
        types = 2 if config.by_sentence else 0
        super().__init__(
            config,
            tokenizer,
            rows=Summaries(config, tokenizer),
            architecture=seq2seq_architecture(tokenizer, config.max_length, token_types=types),
            metrics=Perplexity(),
        )

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return ROUGE of the summaries of `rows`, and of the first three sentences of each source."""
        assert isinstance(model, Transformer)
        pairs = list(rows)
        targets = [pair["target"] for pair in pairs]
        scores = rouge(self.translated(model, [pair["source"] for pair in pairs], workers), targets)
        first = rouge([lead(pair["source"]) for pair in pairs], targets)
        return {**scores, **{f"lead3_{name}": value for name, value in first.items()}}
