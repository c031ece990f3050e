"""Labels inside a text: of words, as for named entities, and of sentences, those that summarize it.

**tag**: a label for each word; measured by entity F1 (BIO). A word may have several tokens; only the first
token has the label. Devlin et al. 2019, section 5.3.

**extract**: an encoder chooses the sentences that summarize a text. It reads <cls> sentence <sep> for each
sentence and scores a sentence at its <cls>. Token types alternate between 0 and 1 from sentence to sentence.
The labels of training are the sentences that a greedy search adds, one after the other, while ROUGE-1 plus
ROUGE-2 with the reference rises. A summary has the sentences with the highest scores, in the order of the
text, without a sentence that shares three words in a row with a better one. Liu 2019 (BertSum), sections 2
and 3.3.

Deviation: the score is the paper's simple classifier, a linear layer; its further Transformer layers over the
vectors of sentences are missing.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import IGNORED
from polyformer.core.ranges import PositiveInt
from polyformer.data import Tokenizer
from polyformer.data.formats.published import UNKNOWN, RougeTokenizer, lead, rouge, scorer
from polyformer.data.rows import Batch, Row
from polyformer.data.rows.structured import sentence_row
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import TagConfig
from polyformer.training.task import SINGLE_PROCESS, Workers
from polyformer.training.tasks.base import Metrics, Rows, label_count
from polyformer.training.tasks.labels import (
    Labels,
    TokenDropoutConfig,
    token_dropout,
)
from polyformer.training.tasks.text import (
    Perplexity,
    TextArchitecture,
    TextRows,
    TextTask,
    TextTaskConfig,
    most_likely,
    row_marks,
    stacked,
    too_long,
)

Entity = tuple[str, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggingConfig(TokenDropoutConfig):
    """Tagging: assign a label to every word of a text, as for named entities."""

    labels: tuple[str, ...] | None = None  # by default the sorted tags of the training data
    max_length: int = 256  # tokens of a sentence, including <cls> and <sep>
    too_long: Literal["refuse", "drop"] = "refuse"  # handling of longer training sentences

    needs: ClassVar[tuple[str, ...]] = ("tokens", "tags")
    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 3
    kind: ClassVar[str] = "tag"
    paper: ClassVar[str] = "Devlin et al. 2019, section 5.3"

    def resolve(self, rows: Rows) -> Self:
        """Return this with the tags of `rows`, sorted."""
        if self.labels is not None:
            return self
        return dataclasses.replace(self, labels=tuple(sorted({tag for row in rows for tag in row["tags"]})))

    def texts(self, rows: Rows) -> Iterator[str]:
        """Return the sentences, with a space between words."""
        return (" ".join(row["tokens"]) for row in rows)


class TaggedWords(TextRows):
    """Rows <cls> words <sep>, with a label at the first token of each word."""

    config: TaggingConfig

    def __init__(self, config: TaggingConfig, tokenizer: Tokenizer, labels: Labels):
        super().__init__(config, tokenizer)
        self.cls, self.sep = row_marks(tokenizer)
        self.corrupt, self.labels = token_dropout(config.token_dropout, tokenizer), labels
        # The token for a word without tokens, because its label needs a position.
        self.unknown = self.sep if tokenizer.unk_id is None else tokenizer.unk_id

    def encode(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the token ids of a sentence, and the index of the first token of each word."""
        spaced = [f" {word}" if number else word for number, word in enumerate(words)]
        ids, firsts = [self.cls], []
        for pieces in self.tokenizer.encode_batch(spaced):
            firsts.append(len(ids))
            ids += pieces or [self.unknown]
        return [*ids, self.sep], firsts

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return sentences of at most `max_length` tokens; longer sentences are dropped or refused."""
        prepared = self.prepare_held_out(rows)
        for number, row in enumerate(prepared):
            if len(row["input_ids"]) > self.config.max_length and self.config.too_long == "refuse":
                name = f"sentence {number + 1} ({quote(' '.join(rows[number]['tokens']))})"
                raise too_long(name, len(row["input_ids"]), self.config.max_length, "drop")
        return [row for row in prepared if len(row["input_ids"]) <= self.config.max_length]

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return sentences of any length, with a label at the first token of each word."""
        prepared = []
        for row in rows:
            ids, firsts = self.encode(row["tokens"])
            labels = [IGNORED] * len(ids)
            if len(row["tags"]) != len(firsts):
                raise InputError(
                    f"tags: expected one for each of {len(firsts)} words, got {len(row['tags'])}"
                )
            for first, tag in zip(firsts, row["tags"]):
                labels[first] = self.labels.number(tag)
            prepared.append({"input_ids": ids, "labels": labels})
        return prepared


class Entities(Metrics):
    """The metrics loss (nats per word), accuracy of tags, and precision, recall and f1 of entities.

    The last three are measured if tags are BIO. An entity is correct if its type, its first and its last word
    are correct.
    """

    sums = 6
    direction = "max"

    def __init__(self, labels: tuple[str, ...]):
        self.labels = labels
        self.has_entities = any(tag.startswith(("B-", "I-")) for tag in labels)
        # For parts of speech, f1 would always be 0.
        self.best = "f1" if self.has_entities else "accuracy"

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, words, correct tags, and entities: correct, predicted, actual."""
        output, labels = model(**batch), batch["labels"]
        words, predictions = labels != IGNORED, most_likely(output)
        count = label_count(batch)
        counts = np.zeros(self.sums - 1)
        for row_labels, row_predictions, here in zip(labels, predictions, words):
            named = ([self.labels[i] for i in row[here].tolist()] for row in (row_labels, row_predictions))
            counts += self.compared(*named)
        return stacked(output.loss.double() * count, *counts.tolist(), device=labels.device)

    @staticmethod
    def compared(tags: Sequence[str], predicted: Sequence[str]) -> tuple[int, ...]:
        """Return the number of words and of correct tags, and of entities: correct, predicted, actual."""
        truth, result = entities(tags), entities(predicted)
        right = sum(tag == other for tag, other in zip(tags, predicted, strict=True))
        return len(tags), right, len(truth & result), len(result), len(truth)

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        nats, words, correct_tags, correct, predicted, actual = totals
        metrics = {"loss": nats / max(words, 1), "accuracy": correct_tags / max(words, 1)}
        if not self.has_entities:
            return metrics
        return {
            **metrics,
            "precision": correct / max(predicted, 1),
            "recall": correct / max(actual, 1),
            "f1": 2 * correct / max(predicted + actual, 1),
        }


class Tagging(TextTask, config=TaggingConfig):
    """Tagging, measured by `Entities`."""

    config: TaggingConfig
    rows: TaggedWords
    metrics: Entities
    command = "tag"

    def __init__(self, config: TaggingConfig, tokenizer: Tokenizer):
        labels = Labels(config.labels)
        self.labels = labels.names
        options: dict[str, Any] = {"num_labels": len(labels)}
        super().__init__(
            config,
            tokenizer,
            rows=TaggedWords(config, tokenizer, labels),
            architecture=TextArchitecture(
                "encoder", TagConfig(**options), tokenizer, config.max_length, head_options=options
            ),
            metrics=Entities(labels.names),
        )

    @torch.no_grad()
    def tag(self, model: nn.Module, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return the tag of every word of every sentence."""
        encoded = [self.rows.encode(words) for words in sentences]
        tags: list[list[str]] = [[]] * len(sentences)
        for numbers, batch in self.rows.batched(model, [ids for ids, _ in encoded]):
            predictions = model(**batch).logits.argmax(-1).tolist()
            for number, prediction in zip(numbers, predictions):
                tags[number] = [self.labels[prediction[first]] for first in encoded[number][1]]
        return tags


def entities(tags: Sequence[str]) -> set[Entity]:
    """Return the entities of BIO tags: (type, first word, word after the last).

    An entity continues while tags are I- of its type; an I- without an entity to continue starts a new
    entity, as in the script of CoNLL-2000. A tag that is neither B- nor I- is outside.
    """
    spans: set[Entity] = set()
    kind, start = "", 0
    for index, tag in enumerate([*tags, "O"]):
        sign, _, name = tag.partition("-")
        inside = sign in ("B", "I")
        if kind and not (sign == "I" and name == kind):
            spans.add((kind, start, index))
            kind = ""
        if inside and not kind:
            kind, start = name, index
    return spans


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
