"""The parts of tasks of texts: rows of token ids, the architecture of a model, metrics, and continued texts.

    loss = nats / labels     perplexity = exp(loss)     accuracy = correct / labels

A loss is in nats (natural logarithm) per label. Metrics are computed from sums over batches.
"""

import abc
import dataclasses
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import IGNORED, batch_to_device, next_labels
from polyformer.core.ranges import check_range
from polyformer.core.sequence.context_parallel import gather_sequence
from polyformer.data import Batches, Collate, Stream, Tokenizer, TokenizerConfig, by_tokens
from polyformer.data.prepared import FramedText
from polyformer.data.prepared.rows import MappedBatches, MappedSegments, PackedText, PreparedText
from polyformer.data.rows import Batch, Corrupt, Row, row_lengths
from polyformer.data.tokenizers import build_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.generation import Generated, GenerationConfig
from polyformer.models.outputs import ModelOutput
from polyformer.nn.heads import AdaptiveSoftmaxConfig, HeadConfig, LanguageModelConfig
from polyformer.training.tasks.base import (
    HeldOut,
    Metrics,
    ModelLoss,
    Rows,
    Task,
    TaskConfig,
    TaskRows,
    TrainingBatches,
    label_count,
)


def exp(value: float) -> float:
    """Return e^value, or infinity if it exceeds the largest float."""
    return math.exp(value) if value < 700 else math.inf


def stacked(*numbers: Tensor | float, device: torch.device) -> Tensor:
    """Return `numbers` as one float64 vector."""
    return torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])


def loss_total(loss: Tensor, count: int) -> Tensor:
    """Return (sum of the loss, count) of a mean `loss` over `count` labels."""
    return stacked(loss.double() * count, count, device=loss.device)


def perplexity_metrics(nats: float, count: float) -> dict[str, float]:
    """Return loss = nats / count and perplexity exp(loss)."""
    loss = nats / max(count, 1)
    return {"loss": loss, "perplexity": exp(loss)}


def most_likely(output: ModelOutput) -> Tensor:
    """Return the most probable class of every token, [..., T], gathered under context parallelism."""
    return gather_sequence(output.logits.argmax(-1), output.slots)


def prediction_totals(output: ModelOutput, labels: Tensor) -> Tensor:
    """Return (sum of the loss, correct predictions, labels) over labels [...] that are not `IGNORED`."""
    assert output.loss is not None
    count = (labels != IGNORED).sum()
    correct = (most_likely(output) == labels).sum()  # IGNORED is not a token, so it never matches
    return stacked(output.loss.double() * count, correct, count, device=labels.device)


def prediction_metrics(nats: float, correct: float, count: float) -> dict[str, float]:
    """Return loss, perplexity and accuracy = correct / count."""
    return {**perplexity_metrics(nats, count), "accuracy": correct / max(count, 1)}


def composed(text: str) -> str:
    """Return `text` in NFC."""
    return unicodedata.normalize("NFC", text)


def text_counts(tokenizer: Tokenizer, rows: Sequence[Row]) -> dict[str, float]:
    """Return the words and bytes of the texts of rows; empty if the tokenizer loses part of them."""
    texts = [composed(row["text"]) for row in rows]
    encoded = tokenizer.encode_batch(texts)
    if any(composed(tokenizer.decode(ids)) != text for ids, text in zip(encoded, texts)):
        return {}
    words = sum(len(text.split()) + text.count("\n") for text in texts)
    return {"words": words, "bytes": sum(len(text.encode()) for text in texts)}


def text_metrics(nats: float, tokens: float, counts: dict[str, float]) -> dict[str, float]:
    """Return the metrics for `nats` of a text: see `TextPerplexity` of the task lm."""
    metrics = perplexity_metrics(nats, tokens)
    if counts:
        metrics["word_perplexity"] = exp(nats / max(counts["words"], 1))
        metrics["bits_per_byte"] = nats / math.log(2) / max(counts["bytes"], 1)
    return metrics


STREAMED_ROWS = 10_000  # maximum number of rows of streamed validation data


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTaskConfig(TaskConfig):
    """Base of tasks with rows of token ids.

    `text_columns`: the texts that a tokenizer is trained on; `length_option`: the option with the maximum
    number of tokens per row, which is at least `shortest`.
    """

    needs: ClassVar[tuple[str, ...]] = ("text",)
    tokenized: ClassVar[bool] = True
    text_columns: ClassVar[tuple[str, ...]] = ("text",)
    length_option: ClassVar[str] = "row_length"
    shortest: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_range(self.length_option, getattr(self, self.length_option), Ge(self.shortest))
        check_batch_size(self.batch_tokens, *self.longest_row)

    @property
    def longest_row(self) -> tuple[str, int]:
        """Return the name of the longest row for error messages, and its number of tokens."""
        return self.length_option, getattr(self, self.length_option)

    def texts(self, rows: Rows) -> Iterator[str]:
        """Return the texts that a tokenizer for this task is trained on."""
        return (row[column] for row in rows for column in self.text_columns)

    def tokenizer(self, config: TokenizerConfig, rows: Rows) -> Tokenizer:
        """Return the tokenizer of `config`, trained on `texts(rows)` if needed, or of prepared text."""
        if isinstance(rows, PreparedText):
            return rows.tokenizer_for(config)
        return build_tokenizer(config, self.texts(rows))


class TextRows(TaskRows):
    """The rows of token ids of a task, in batches by number of tokens.

    `corrupt`: a function applied to a training row each time it enters a batch, or None; with
    `corrupts_held_out` also to held-out rows, in the same way in every evaluation. `frame`: the special
    tokens before and after each document, for tasks that pack documents end to end; only these read prepared
    text.
    """

    corrupts_held_out: bool = False
    corrupt: Corrupt | None = None
    frame: tuple[int, int] | None = None

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__()
        self.config, self.tokenizer, self.batch_tokens = config, tokenizer, config.batch_tokens
        self.collate = Collate(0 if tokenizer.pad_id is None else tokenizer.pad_id)

    @abc.abstractmethod
    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Convert rows of text to rows of token ids and labels, for training."""

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Convert rows of text for evaluation."""
        return self.prepare(rows)

    def count(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return counts of held-out text that metrics need in addition to the sums over batches."""
        return {}

    def encoded(self, rows: Sequence[Row]) -> list[Sequence[int]]:
        """Return the tokens of the text of each row, which prepared text already contains."""
        if rows and "input_ids" in rows[0]:
            return [row["input_ids"] for row in rows]
        return [*self.tokenizer.encode_batch([row["text"] for row in rows])]

    def training_batches(self, rows: Any, seed: int) -> TrainingBatches:
        """Return batches of `rows`: prepared in memory, streamed (no length), or of prepared text."""
        if isinstance(rows, PreparedText):
            return self.mapped_batches(rows, seed)
        plan = partial(by_tokens, max_tokens=self.batch_tokens)
        options: dict[str, Any] = {"plan": plan, "collate": self.collate, "seed": seed}
        options["corrupt"] = self.corrupt
        if hasattr(rows, "__len__"):
            return Batches(self.prepare(list(rows)), **options)
        return Stream(rows, self.prepare, **options)

    def mapped_batches(self, text: PreparedText, seed: int) -> MappedBatches | MappedSegments:
        """Return batches of rows that are read from files on demand."""
        length = getattr(self.config, self.config.length_option)
        parts = [PackedText(framed, length, self.collate.pad_id) for framed in self.framed(text)]
        rows = self.batch_tokens // length
        return MappedBatches(parts, text.rates, rows, self.collate, seed, self.corrupt)

    def framed(self, text: PreparedText) -> list[FramedText]:
        """Return the parts of prepared text with the tokens of `frame`.

        Raises `InputError` for text of another tokenizer, and for a task that packs no documents.
        """
        if self.frame is None:
            raise InputError(
                f"data: {text.name} is prepared text, which the tasks lm, mlm, electra, permuted_lm and "
                "masked_diffusion read, as packed rows that they mask; name the text itself"
            )
        text.check_tokenizer(self.tokenizer, "tokenizer")
        return [FramedText(part, *self.frame) for part in text.parts]

    def held_out(self, rows: Rows) -> HeldOut:
        """Return `rows` of text prepared for evaluation; only the first `STREAMED_ROWS` of streamed rows."""
        kept = list(rows if hasattr(rows, "__len__") else islice(rows, STREAMED_ROWS))
        prepared = self.prepare_held_out(kept)
        longest = int(row_lengths(prepared).max(initial=1))  # may exceed the maximum of training
        plan = partial(by_tokens, max_tokens=max(self.batch_tokens, longest))
        # With the same seed in every evaluation.
        corrupt = self.corrupt if self.corrupts_held_out else None
        batches = Batches(prepared, plan, self.collate, shuffle=False, corrupt=corrupt)
        return HeldOut(batches, self.counted(rows, kept))

    def counted(self, rows: Rows, kept: Sequence[Row]) -> dict[str, float]:
        """Return `count` of the rows that are kept; prepared text contains its counts."""
        return rows.counts if isinstance(rows, PreparedText) else self.count(kept)

    def batched(
        self, model: nn.Module, rows: Sequence[list[int] | Row], max_tokens: int = 0
    ) -> Iterator[tuple[list[int], Batch]]:
        """Return `batched` with the padding and, by default, the `batch_tokens` of the task."""
        return batched(model, rows, self.collate, max_tokens or self.batch_tokens)


WITH_ARTICLE = {
    "decoder": "a decoder",
    "encoder": "an encoder",
    "encoder-decoder": "an encoder-decoder",
}
"""The stacks of a model, in a sentence."""


@dataclasses.dataclass(frozen=True)
class TextArchitecture:
    """The model of texts that a task needs.

    `stacks`: "decoder", "encoder" or "encoder-decoder". `head`: replaces the head of a model unless that has
    the same type; then it keeps its options, except `head_options`. `positions`: the tokens of the longest
    row that the model reads or generates. `tables`: minimum sizes of embedding tables, such as
    type_vocab_size. `packs_documents`: whether a row may contain several documents, which the model must
    separate. `change`: the last change of the configuration, which may refuse it.
    """

    stacks: str
    head: HeadConfig
    tokenizer: Tokenizer
    positions: int
    head_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, int] = dataclasses.field(default_factory=dict)
    packs_documents: bool = False
    change: Callable[[ModelConfig], ModelConfig] | None = None

    def adapt(self, config: Any) -> ModelConfig:
        """Return `config` with the vocabulary, special tokens, positions and head of the task.

        Raises:
            InputError: the wrong stacks, or attention that cannot separate packed documents although the task
                packs them.
        """
        self.check_stacks(config)
        tokenizer = self.tokenizer
        fitted = dataclasses.replace(
            config,
            vocab_size=len(tokenizer),
            special=SpecialTokens(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id),
            head=self.fit_head(config.head),
            max_position_embeddings=self.positions,
        )
        if self.tables:
            fitted = with_tables(fitted, **self.tables)
        return fitted if self.change is None else self.change(fitted)

    def check_stacks(self, config: Any) -> None:
        """Raise `InputError` for other stacks, and for attention that cannot separate packed documents."""
        if not isinstance(config, ModelConfig):
            raise InputError(f"model: this task needs {self.stacks} stacks, got a model that reads no text")
        has = "-".join(name for name in ("encoder", "decoder") if getattr(config, name) is not None)
        if has != self.stacks:
            expected, actual = WITH_ARTICLE[self.stacks], WITH_ARTICLE.get(has, "no stack")
            raise InputError(f"model: this task needs {expected} model, got one with {actual}")
        if self.packs_documents:
            for stack in (config.encoder, config.decoder):
                if stack is not None:
                    stack.attention.mechanism.require("supports_packing")

    def fit_head(self, head: HeadConfig) -> HeadConfig:
        """Return the model's head if it has the right type, else the head of the task."""
        if isinstance(head, AdaptiveSoftmaxConfig) and isinstance(self.head, LanguageModelConfig):
            return head
        if not isinstance(head, type(self.head)):
            return self.head
        return dataclasses.replace(head, **self.head_options) if self.head_options else head


class Perplexity(Metrics):
    """The metrics of a loss over labels: loss (nats per label) and perplexity.

    `weight`: the number of labels in the mean of the loss of a batch.
    """

    sums = 2

    def __init__(self, weight: Callable[[Batch], int] = label_count):
        self.weight = weight

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of the loss over the labels, and the number of labels."""
        return loss_total(model(**batch).loss, self.weight(batch))

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return loss (nats per label) and perplexity exp(loss)."""
        return perplexity_metrics(*totals)


class TokenPredictions(Metrics):
    """The metrics of predicted tokens: loss (nats per labelled token), perplexity exp(loss), accuracy."""

    sums = 3

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return (sum of the loss, correct predictions, labels)."""
        return prediction_totals(model(**batch), batch["labels"])

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return loss, perplexity and accuracy."""
        return prediction_metrics(*totals)


class TextTask(Task):
    """A task with rows of token ids and a model of texts."""

    rows: TextRows
    architecture: TextArchitecture


def batched(
    model: nn.Module, rows: Sequence[list[int] | Row], collate: Collate, max_tokens: int
) -> Iterator[tuple[list[int], Batch]]:
    """Yield batches for prediction, on the model's device, each with the numbers of its rows.

    `rows` are token ids, or dicts of these and more; a batch has at most `max_tokens` tokens, or one row.
    """
    device = next(model.parameters()).device
    inputs = [row if isinstance(row, dict) else {"input_ids": row} for row in rows]
    lengths = row_lengths(inputs)
    limit = max(max_tokens, int(lengths.max(initial=1)))
    for numbers in by_tokens(lengths, None, max_tokens=limit):
        batch = collate([inputs[number] for number in numbers])
        yield numbers.tolist(), batch_to_device(batch, device)


def with_tables(config: ModelConfig, **least: int) -> ModelConfig:
    """Return `config` with minimum sizes of its embedding tables, such as type_vocab_size."""
    sizes = {name: max(getattr(config.embedding, name), number) for name, number in least.items()}
    return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, **sizes))


def starting_from_pad(config: ModelConfig) -> ModelConfig:
    """Return `config` with a decoder that starts from <pad> if the tokenizer has no <bos>, as in T5."""
    if config.special.bos is not None:
        return config
    start = required(config.special.pad, "<bos> or <pad>")
    return dataclasses.replace(config, special=dataclasses.replace(config.special, bos=start))


def check_batch_size(batch_tokens: int, name: str, longest: int) -> None:
    """Raise `InputError` if a batch is too small for the longest row, called `name` in the message."""
    if batch_tokens < longest:
        raise InputError(f"batch_tokens: expected {name}, {longest}, or more, got {batch_tokens}")


def row_marks(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the ids of <cls> and <sep>, which begin and end the rows of encoders."""
    return required(tokenizer.cls_id, "<cls>"), required(tokenizer.sep_id, "<sep>")


def required(token_id: int | None, role: str) -> int:
    """Return the id of a special token; raise `InputError` if the tokenizer has none."""
    if token_id is None:
        raise InputError(
            f"tokenizer: it has no {role} token, which this task needs; train one with another algorithm"
        )
    return token_id


def too_long(name: str, length: int, limit: int, way: str) -> InputError:
    """Return an error for a text of `length` tokens; `way` is a value of task.too_long that avoids it."""
    return InputError(
        f"{name} has {length} tokens, more than task.max_length {limit}; "
        f"raise it, or set task.too_long to {quote(way)}"
    )


class Continuation(abc.ABC):
    """Generation of texts that start with a prompt."""

    tokenizer: Tokenizer

    @abc.abstractmethod
    def start(self, prompt: str) -> list[int]:
        """Return the token ids of a text that starts with `prompt`, to be continued."""

    def generate(
        self,
        model: Transformer,
        prompt: str,
        config: GenerationConfig,
        streamer: Callable[[Tensor], None] | None = None,
    ) -> list[str]:
        """Return continuations of `prompt`."""
        generated = self.write(model, prompt, config, streamer)
        return generated.texts(self.tokenizer.decode, config.stop)

    def write(
        self,
        model: Transformer,
        prompt: str,
        config: GenerationConfig,
        streamer: Callable[[Tensor], None] | None = None,
        **more: Any,
    ) -> Generated:
        """Return the same as tokens; `more`: of `polyformer.models.generation.generate`, such as `draft`."""
        ids = torch.tensor([self.start(prompt)], device=next(model.parameters()).device)
        return model.generate(ids, None, config, streamer, self.tokenizer.decode, **more)


class NextTokens(ModelLoss):
    """The loss of a language model, a mean over the tokens with a next token in their document."""

    def weight(self, batch: Batch) -> int:
        """Return the number of tokens with a next token in their document."""
        if "shift_labels" in batch:
            return int((batch["shift_labels"] != IGNORED).sum())
        return int((next_labels(batch["labels"], batch["document_ids"]) != IGNORED).sum())
