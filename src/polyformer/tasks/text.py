"""Tasks of texts: what a tokenizer reads, rows of token ids, batches of them, and the model's vocabulary."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor, nn

from polyformer.architecture import ModelConfig, SpecialTokens
from polyformer.core.errors import InputError, quote
from polyformer.data import Batches, Collate, Stream, Tokenizer, TokenizerConfig, by_tokens
from polyformer.data.batching import Batch, Corrupt, Row, row_lengths
from polyformer.data.prepared.framed import FramedText
from polyformer.data.prepared.in_order import MappedSegments
from polyformer.data.prepared.rows import MappedBatches, PackedText
from polyformer.data.prepared.text import PreparedText
from polyformer.data.segments import Segments
from polyformer.data.tokenizer_loading import build_tokenizer
from polyformer.heads import AdaptiveSoftmaxConfig, HeadConfig, LanguageModelConfig
from polyformer.tasks.base import HeldOut, Rows, Task, TaskConfig
from polyformer.tasks.metrics import loss_total, perplexity_metrics
from polyformer.training.config import at_least

STREAMED_ROWS = 10_000  # of streamed validation data, the first so many are measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTaskConfig(TaskConfig):
    """A task whose rows are token ids.

    `text_columns`: the texts that a tokenizer is trained on; `length_option`: the option with the number of
    tokens of the longest row, which is at least `shortest`.
    """

    tokenized: ClassVar[bool] = True
    text_columns: ClassVar[tuple[str, ...]] = ("text",)
    length_option: ClassVar[str] = "row_length"
    shortest: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self.shortest, **{self.length_option: getattr(self, self.length_option)})
        check_batch_size(self.batch_tokens, *self.longest_row)

    @property
    def longest_row(self) -> tuple[str, int]:
        """What the longest row is called in errors, and how many tokens it has."""
        return self.length_option, getattr(self, self.length_option)

    def texts(self, rows: Rows) -> Iterator[str]:
        """The texts that a tokenizer for this task is trained on."""
        return (row[column] for row in rows for column in self.text_columns)

    def tokenizer(self, config: TokenizerConfig, rows: Rows) -> Tokenizer:
        """The tokenizer that `config` describes, trained on `texts(rows)` if it must be; of prepared text its
        own."""
        if isinstance(rows, PreparedText):
            return rows.tokenizer_for(config)
        return build_tokenizer(config, self.texts(rows))


class TextTask(Task):
    """A task whose rows are token ids. Metrics, unless a task has others: loss (nats a label), perplexity."""

    stacks: ClassVar[str]
    """The model it needs: "decoder", "encoder" or "encoder-decoder"."""
    head: HeadConfig
    sums = 2

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config)
        self.config, self.tokenizer = config, tokenizer
        self.collate = Collate(0 if tokenizer.pad_id is None else tokenizer.pad_id)

    @abc.abstractmethod
    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Rows of text to rows of token ids and labels, for training."""

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """The same for evaluation."""
        return self.prepare(rows)

    def count(self, rows: Sequence[Row]) -> dict[str, float]:
        """What `metrics` needs to know about held-out text besides the sums over its batches."""
        return {}

    @property
    def frame(self) -> tuple[int, int] | None:
        """The tokens before and behind each document, of a task whose rows are such documents packed end to
        end, as those of prepared text are."""
        return None

    def encoded(self, rows: Sequence[Row]) -> list[Sequence[int]]:
        """The tokens of each row's text, which prepared text has ready."""
        if rows and "input_ids" in rows[0]:
            return [row["input_ids"] for row in rows]
        return [*self.tokenizer.encode_batch([row["text"] for row in rows])]

    @property
    def corrupt(self) -> Corrupt | None:
        """What is done to a prepared training row each time it enters a batch."""
        return None

    @property
    def corrupt_held_out(self) -> Corrupt | None:
        """The same for evaluation."""
        return None

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """The sum of the loss over the labels, and the number of labels."""
        return loss_total(model(**batch).loss, self.weight(batch))

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """loss (nats a label) and perplexity exp(loss)."""
        return perplexity_metrics(*totals)

    def adapt(self, config: Any) -> ModelConfig:
        """`config` with the vocabulary, special tokens, positions and head of this task.

        Raises:
            InputError: the wrong stacks, or attention that cannot keep packed documents apart where the task
                packs them.
        """
        if not isinstance(config, ModelConfig):
            raise InputError(f"model: this task needs {self.stacks} stacks, got a model that reads no text")
        has = "-".join(name for name in ("encoder", "decoder") if getattr(config, name) is not None)
        if has != self.stacks:
            raise InputError(
                f"model: this task needs an {self.stacks} model, got one with an {has}".replace("an d", "a d")
            )
        if self.packs:
            for stack in (config.encoder, config.decoder):
                if stack is not None:
                    stack.attention.mechanism.require("packs")
        tokenizer = self.tokenizer
        return dataclasses.replace(
            config,
            vocab_size=len(tokenizer),
            special=SpecialTokens(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id),
            head=self.fit_head(config.head),
            max_position_embeddings=self.positions,
        )

    @property
    def packs(self) -> bool:
        """Whether a row may hold several documents, which the model must keep apart."""
        return False

    @property
    def positions(self) -> int:
        """Tokens in the longest row that the model reads or writes."""
        return getattr(self.config, self.config.length_option)

    def fit_head(self, head: HeadConfig) -> HeadConfig:
        """The model's own head where it is of the right kind, else the task's."""
        adaptive = isinstance(head, AdaptiveSoftmaxConfig) and isinstance(self.head, LanguageModelConfig)
        return head if adaptive or isinstance(head, type(self.head)) else self.head

    def training_batches(
        self, rows: Any, seed: int
    ) -> Batches | Stream | Segments | MappedBatches | MappedSegments:
        """Batches of `rows`: prepared in memory, as they are read where `rows` have no length, or of tokens
        that are ready."""
        if isinstance(rows, PreparedText):
            return self.mapped_batches(rows, seed)
        plan = partial(by_tokens, max_tokens=self.batch_tokens)
        options: dict[str, Any] = {
            "plan": plan,
            "collate": self.collate,
            "seed": seed,
            "corrupt": self.corrupt,
        }
        if hasattr(rows, "__len__"):
            return Batches(self.prepare(list(rows)), **options)
        return Stream(rows, self.prepare, **options)

    def mapped_batches(self, text: PreparedText, seed: int) -> MappedBatches | MappedSegments:
        """Batches of rows that are read from files when their turn comes."""
        length = getattr(self.config, self.config.length_option)
        parts = [PackedText(framed, length, self.collate.pad_id) for framed in self.framed(text)]
        rows = self.batch_tokens // length
        return MappedBatches(parts, text.rates, rows, self.collate, seed, self.corrupt)

    def framed(self, text: PreparedText) -> list[FramedText]:
        """The parts of prepared text with the tokens of `frame`; `InputError` for those of another tokenizer,
        and of a task that packs no documents."""
        if self.frame is None:
            raise InputError(
                f"data: {text.name} is prepared text, which the tasks lm, mlm and electra read, as packed "
                "rows with masks of their own; name the text itself"
            )
        text.check_tokenizer(self.tokenizer, "tokenizer")
        return [FramedText(part, *self.frame) for part in text.parts]

    def held_out(self, rows: Rows) -> HeldOut:
        """`rows` of text made ready to measure on; of streamed rows the first `STREAMED_ROWS`."""
        kept = list(rows if hasattr(rows, "__len__") else islice(rows, STREAMED_ROWS))
        prepared = self.prepare_held_out(kept)
        longest = int(row_lengths(prepared).max(initial=1))  # may be more than training takes
        plan = partial(by_tokens, max_tokens=max(self.batch_tokens, longest))
        batches = Batches(prepared, plan, self.collate, shuffle=False, corrupt=self.corrupt_held_out)
        return HeldOut(batches, self.counted(rows, kept))

    def counted(self, rows: Rows, kept: Sequence[Row]) -> dict[str, float]:
        """`count` of the rows that are kept, which is known of prepared text."""
        return rows.counts if isinstance(rows, PreparedText) else self.count(kept)

    def batched(
        self, model: nn.Module, rows: Sequence[list[int] | Row], max_tokens: int = 0
    ) -> Iterator[tuple[list[int], Batch]]:
        """`batched` with the task's padding and, by default, its `batch_tokens`."""
        return batched(model, rows, self.collate, max_tokens or self.batch_tokens)


class EncoderTask(TextTask):
    """A task of an encoder whose rows stand between <cls> and <sep>."""

    stacks = "encoder"

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cls, self.sep = required(tokenizer.cls_id, "<cls>"), required(tokenizer.sep_id, "<sep>")


def batched(
    model: nn.Module, rows: Sequence[list[int] | Row], collate: Collate, max_tokens: int
) -> Iterator[tuple[list[int], Batch]]:
    """Batches to predict from, on the model's device, each with the numbers of its rows.

    `rows` are token ids, or dicts of these and more; a batch has at most `max_tokens` tokens, or one row.
    """
    device = next(model.parameters()).device
    inputs = [row if isinstance(row, dict) else {"input_ids": row} for row in rows]
    lengths = row_lengths(inputs)
    limit = max(max_tokens, int(lengths.max(initial=1)))
    for numbers in by_tokens(lengths, None, max_tokens=limit):
        batch = collate([inputs[number] for number in numbers])
        yield numbers.tolist(), {name: tensor.to(device) for name, tensor in batch.items()}


def with_tables(config: ModelConfig, **least: int) -> ModelConfig:
    """`config` with tables of its embedding, such as type_vocab_size, of at least so many rows."""
    sizes = {name: max(getattr(config.embedding, name), number) for name, number in least.items()}
    return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, **sizes))


def starting_from_pad(config: ModelConfig) -> ModelConfig:
    """`config` whose decoder starts from <pad> where the tokenizer has no <bos>, as in T5."""
    if config.special.bos is not None:
        return config
    start = required(config.special.pad, "<bos> or <pad>")
    return dataclasses.replace(config, special=dataclasses.replace(config.special, bos=start))


def check_batch_size(batch_tokens: int, name: str, longest: int) -> None:
    """Raises `InputError` if a batch has no room for the longest row, which is called `name`."""
    if batch_tokens < longest:
        raise InputError(f"batch_tokens: expected {name}, {longest}, or more, got {batch_tokens}")


def required(token_id: int | None, role: str) -> int:
    """The id of a special token; raises `InputError` if the tokenizer has none."""
    if token_id is None:
        raise InputError(
            f"tokenizer: it has no {role} token, which this task needs; train one with another algorithm"
        )
    return token_id


def too_long(name: str, length: int, limit: int, way: str) -> InputError:
    """An error for a text of `length` tokens; `way` is what task.too_long can do about it."""
    return InputError(
        f"{name} has {length} tokens, more than task.max_length {limit}; "
        f"raise it, or set task.too_long to {quote(way)}"
    )
