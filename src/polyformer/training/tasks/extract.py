"""Extractive summarization: an encoder chooses the sentences that summarize a text.

The encoder reads <cls> sentence <sep> for each sentence and scores a sentence at its <cls>. Token types
alternate between 0 and 1 from sentence to sentence. The labels of training are the sentences that a greedy
search adds, one after the other, while ROUGE-1 plus ROUGE-2 with the reference rises. A summary has the
sentences with the highest scores, in the order of the text, without a sentence that shares three words in a
row with a better one. Liu 2019 (BertSum), sections 2 and 3.3.

Deviation: the score is the paper's simple classifier, a linear layer; its further Transformer layers over the
vectors of sentences are missing.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from polyformer.core.host_values import IGNORED
from polyformer.core.ranges import PositiveInt
from polyformer.data import Tokenizer
from polyformer.data.formats.published import UNKNOWN, RougeTokenizer, lead, rouge, scorer
from polyformer.data.rows.batching import Row
from polyformer.data.rows.structured import sentence_row
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import TagConfig
from polyformer.training.tasks.base import Rows
from polyformer.training.tasks.evaluation import SINGLE_PROCESS, Workers
from polyformer.training.tasks.text import (
    Perplexity,
    TextArchitecture,
    TextRows,
    TextTask,
    TextTaskConfig,
    row_marks,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractConfig(TextTaskConfig):
    """Extractive summarization: choose the sentences that summarize a text."""

    max_length: int = 512  # tokens of a text; sentences that do not fit are left out
    sentences: PositiveInt = 3  # of a summary

    needs: ClassVar[tuple[str, ...]] = ("source", "target")
    text_columns: ClassVar[tuple[str, ...]] = ("source",)
    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 3
    kind: ClassVar[str] = "extract"
    paper: ClassVar[str] = "Liu 2019 (BertSum), section 2"


class ScoredSentences(TextRows):
    """Rows <cls> sentence <sep> ..., with a label at the <cls> of each sentence."""

    config: ExtractConfig

    def __init__(self, config: ExtractConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cls, self.sep = row_marks(tokenizer)
        scorer()  # raises now if it is missing, instead of at the end of training

    def read(self, text: str) -> tuple[list[str], Row]:
        """Return the sentences that fit, and their token ids and types; a long first sentence is cut."""
        return sentence_row(self.tokenizer, text, self.config.max_length)

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return texts with a label at the <cls> of every sentence: whether it belongs to the summary."""
        prepared = []
        for row in rows:
            sentences, read = self.read(row["source"])
            chosen = {*oracle(sentences, row["target"], self.config.sentences)}
            labels, number = [], itertools.count()
            for token in read["input_ids"]:
                labels.append(int(next(number) in chosen) if token == self.cls else IGNORED)
            if sentences:
                prepared.append({**read, "labels": labels})
        return prepared


class SentenceLoss(Perplexity):
    """The metric loss: nats per sentence."""

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return loss."""
        return {"loss": totals[0] / max(totals[1], 1)}


def scoring_tokens(config: ModelConfig) -> ModelConfig:
    """Return `config` with a score for every token."""
    return dataclasses.replace(config, head=TagConfig(num_labels=2))


class Extraction(TextTask, config=ExtractConfig):
    """Extractive summarization, measured by `SentenceLoss`.

    `finish` adds rouge1, rouge2 and rougeL (F1, 0 to 100) of the chosen sentences, lead3_... of the first
    three sentences, and oracle_... of the labels.
    """

    config: ExtractConfig
    rows: ScoredSentences

    def __init__(self, config: ExtractConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=ScoredSentences(config, tokenizer),
            architecture=TextArchitecture(
                "encoder",
                TagConfig(num_labels=2),
                tokenizer,
                config.max_length,
                tables={"type_vocab_size": 2},
                change=scoring_tokens,
            ),
            metrics=SentenceLoss(),
        )

    @torch.no_grad()
    def extract(self, model: nn.Module, texts: Sequence[str]) -> list[str]:
        """Return the summary of every text; empty for a text without a sentence."""
        readings = [self.rows.read(text) for text in texts]
        summaries = [""] * len(texts)
        real = [number for number, (sentences, _) in enumerate(readings) if sentences]
        for numbers, batch in self.rows.batched(model, [readings[number][1] for number in real]):
            logits = model(**batch).logits
            scores = logits[..., 1] - logits[..., 0]
            for row, number in enumerate(numbers):
                sentences = readings[real[number]][0]
                values = scores[row][batch["input_ids"][row] == self.rows.cls][: len(sentences)]
                best = values.argsort(descending=True, stable=True).tolist()
                summaries[real[number]] = " ".join(distinct(sentences, best, self.config.sentences))
        return summaries

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return ROUGE of the chosen sentences, of the first three, and of the labels."""
        pairs = list(rows)
        sources, targets = ([pair[name] for pair in pairs] for name in ("source", "target"))
        texts = {
            "": workers.each(lambda part: self.extract(model, part), sources),
            "lead3_": [lead(source) for source in sources],
            "oracle_": [self._oracle(pair["source"], pair["target"]) for pair in pairs],
        }
        return {
            f"{prefix}{name}": value
            for prefix, summaries in texts.items()
            for name, value in rouge(summaries, targets).items()
        }

    def _oracle(self, source: str, target: str) -> str:
        sentences, _ = self.rows.read(source)
        return " ".join(
            sentences[number] for number in sorted(oracle(sentences, target, self.config.sentences))
        )


def oracle(sentences: Sequence[str], target: str, limit: int) -> list[int]:
    """Return the numbers of at most `limit` sentences; each increases ROUGE-1 plus ROUGE-2 the most."""
    scoring = scorer("rouge1", "rouge2")
    chosen: list[int] = []
    best = 0.0

    def value(numbers: Sequence[int]) -> float:
        text = " ".join(sentences[number] for number in sorted(numbers)).replace(UNKNOWN, " ")
        return sum(score.fmeasure for score in scoring.score(target.replace(UNKNOWN, " "), text).values())

    while len(chosen) < min(limit, len(sentences)):
        others = [number for number in range(len(sentences)) if number not in chosen]
        values = {number: value([*chosen, number]) for number in others}
        candidate = max(others, key=values.__getitem__)
        if values[candidate] <= best:
            break
        chosen.append(candidate)
        best = values[candidate]
    return chosen


def distinct(sentences: Sequence[str], best: Sequence[int], limit: int) -> list[str]:
    """Return the first `limit` sentences in the order of `best` that share no three words, in text order."""
    chosen: list[int] = []
    seen: set[tuple[str, ...]] = set()
    for number in best:
        words = RougeTokenizer().tokenize(sentences[number])
        triples = {*zip(words, words[1:], words[2:])}
        if not triples & seen and len(chosen) < limit:
            chosen.append(number)
            seen |= triples
    return [sentences[number] for number in sorted(chosen)]
