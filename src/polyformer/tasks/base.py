"""What all tasks share: rows of text to batches, sums over batches to metrics, and their place in the loop.

A task is written as a few small methods: how a row of text becomes a row of token ids (`prepare`), which
model it needs (`adapt`), what it counts in a batch (`totals`) and what the sums say (`metrics`). `Fitting`
joins a task with its data and is what the training loop runs.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.architecture import ModelConfig, SpecialTokens
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.data import (
    Batches,
    Collate,
    Masking,
    Stream,
    Tokenizer,
    TokenizerConfig,
    by_tokens,
    pack,
)
from polyformer.data.batching import Batch, Corrupt, Row, row_lengths
from polyformer.data.windows import Windows
from polyformer.heads import HeadConfig
from polyformer.model import Transformer
from polyformer.outputs import ModelOutput
from polyformer.training import share
from polyformer.training.config import at_least

if TYPE_CHECKING:
    from accelerate import Accelerator

STREAMED_ROWS = 10_000  # of streamed validation data, the first so many are measured

Rows = Iterable[Any]
"""Rows of text: dicts of the columns in `needs`, as `polyformer.data.load` gives them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig(Config):
    """Family of tasks. `needs`: the columns a row of data must have; `tokenized`: whether they are texts,
    read by a tokenizer."""

    needs: ClassVar[tuple[str, ...]] = ()
    tokenized: ClassVar[bool] = True

    batch_tokens: int = 4096  # tokens in a batch, padding included; of pairs on the longer side

    def __post_init__(self) -> None:
        at_least(1, batch_tokens=self.batch_tokens)

    def resolve(self, rows: Rows) -> Self:
        """This configuration with what only the training rows can tell (the names of labels) filled in."""
        return self

    def texts(self, rows: Rows) -> Iterator[str]:
        """What a tokenizer for this task is trained on."""
        raise NotImplementedError

    def tokenizer(self, config: TokenizerConfig, rows: Rows) -> Tokenizer:
        """The tokenizer that `config` describes, trained on `rows` if it must be."""
        return Tokenizer.build(config, self.texts(rows))

    def build(self, tokenizer: Any) -> "TextTask":
        """The task; of one that is not `tokenized` the tokenizer is None."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Workers:
    """Who shares the work of an evaluation, and how sums are added up; alone by default."""

    rank: int = 0
    world: int = 1
    add: Callable[[Tensor], Tensor] = lambda total: total

    @classmethod
    def of(cls, accelerator: "Accelerator") -> "Workers":
        if accelerator.num_processes == 1:
            return cls()
        add = partial(accelerator.reduce, reduction="sum")
        return cls(accelerator.process_index, accelerator.num_processes, add)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Data to measure on: batches in a fixed order, and what was counted in their text."""

    batches: Batches | Windows
    counts: dict[str, float]


class TextTask(abc.ABC):
    """One way to train a model on text with `tokenizer`; see the module's docstring for its parts."""

    best: ClassVar[str] = "loss"
    direction: ClassVar[Literal["min", "max"]] = "min"
    stacks: ClassVar[str]  # "decoder", "encoder" or "encoder-decoder": the model it needs
    sums: int  # how many numbers `totals` gives
    head: HeadConfig

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer):
        self.batch_tokens, self.tokenizer = config.batch_tokens, tokenizer
        self.collate = Collate(0 if tokenizer.pad_id is None else tokenizer.pad_id)
        self.notes: list[str] = []  # what the user should know of the texts that were prepared

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
    def corrupt(self) -> Corrupt | None:
        """What is done to a prepared training row each time it is served."""
        return None

    @property
    def corrupt_held_out(self) -> Corrupt | None:
        """The same for evaluation."""
        return None

    def weight(self, batch: Batch) -> int:
        """How many labels the mean loss of `batch` runs over."""
        return int((batch["labels"] != -100).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """What is trained: the mean over labels."""
        return model(**batch).loss

    @abc.abstractmethod
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Numbers (float64 [sums]) whose sums over batches are what `metrics` reads."""

    @abc.abstractmethod
    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """The metrics of held-out data from the sums over its batches and the counts of its text."""

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """`config` with the vocabulary, special tokens, positions and head of this task.

        Raises:
            InputError: the wrong stacks, or attention that cannot keep packed documents apart where the task
                packs them.
        """
        if not isinstance(config, ModelConfig):
            raise InputError(f"model: this task needs {self.stacks} stacks, got a model of trajectories")
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
        special = SpecialTokens(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
        head = self.fit_head(config.head)
        positions = self.positions or config.max_position_embeddings
        return dataclasses.replace(
            config, vocab_size=len(tokenizer), special=special, head=head, max_position_embeddings=positions
        )

    def join(self, model: Transformer, run: Path | None = None) -> nn.Module:
        """What is trained and measured: `model`, or a module of it and a helper, new or as saved in `run`."""
        return model

    def helpers(self, joined: nn.Module) -> dict[str, Transformer]:
        """What `join` put beside the model, by its folder in that of the run."""
        return {}

    @property
    def packs(self) -> bool:
        """Whether a row may hold several documents, which the model must keep apart."""
        return False

    @property
    def positions(self) -> int:
        """Tokens in the longest row; 0 where rows have no limit."""
        return 0

    def fit_head(self, head: HeadConfig) -> HeadConfig:
        """The model's own head where it is of the right kind, else the task's."""
        return head if isinstance(head, type(self.head)) else self.head

    def served(self, rows: Any, seed: int) -> Batches | Stream | Windows:
        """`rows` to train on, made ready; in memory, or as they are read where they have no length."""
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

    def held_out(self, rows: Rows) -> HeldOut:
        """`rows` of text made ready to measure on."""
        kept = list(rows if hasattr(rows, "__len__") else islice(rows, STREAMED_ROWS))
        prepared = self.prepare_held_out(kept)
        longest = int(row_lengths(prepared).max(initial=1))  # may be more than training takes
        plan = partial(by_tokens, max_tokens=max(self.batch_tokens, longest))
        batches = Batches(prepared, plan, self.collate, shuffle=False, corrupt=self.corrupt_held_out)
        return HeldOut(batches, self.count(kept))

    @torch.no_grad()
    def measure(self, model: nn.Module, held: HeldOut, workers: Workers = Workers()) -> dict[str, float]:
        """Metrics of `model` (in evaluation mode) on held-out data, the same on every worker."""
        device = next(model.parameters()).device
        total = torch.zeros(self.sums, dtype=torch.float64, device=device)
        for _, batch in share(held.batches.epoch(0), 0, workers.rank, workers.world):
            total += self.totals(model, {name: one.to(device) for name, one in batch.items()})
        return self.metrics(workers.add(total).tolist(), held.counts)

    def batched(
        self, model: nn.Module, rows: Sequence[list[int] | Row], max_tokens: int = 0
    ) -> Iterator[tuple[list[int], Batch]]:
        """Batches of token ids, or of rows with more than these, to predict from, on the model's device, each
        with the numbers of its rows."""
        return batched(model, rows, self.collate, max_tokens or self.batch_tokens)

    def finish(self, model: nn.Module, rows: Rows) -> dict[str, float]:
        """Metrics that are too slow to take while training; none for most tasks."""
        return {}

    def score(self, model: nn.Module, rows: Rows) -> dict[str, float]:
        """Everything there is to say about a finished model on `rows`."""
        return {**self.measure(model, self.held_out(rows)), **self.finish(model, rows)}


class CorruptingTask(TextTask):
    """Tasks whose held-out text is corrupted as the training text is, once for all."""

    @property
    def corrupt_held_out(self) -> Corrupt | None:
        return self.corrupt


class GuessingTask(CorruptingTask):
    """Tasks measured by the labelled tokens alone: see `of_guesses`."""

    sums = 3

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        return guesses(model(**batch), batch["labels"])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        return of_guesses(*totals)


class MaskingTask(CorruptingTask):
    """Tasks that hide tokens of rows with <cls> and <sep>, as their configuration's `masking` says."""

    stacks = "encoder"

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cls, self.sep = required(tokenizer.cls_id, "<cls>"), required(tokenizer.sep_id, "<sep>")
        self.masking = Masking(config.masking, tokenizer, required(tokenizer.mask_id, "<mask>"))

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        return self.masking.copies(self.prepare_held_out(rows))

    def documents(self, rows: Sequence[Row], length: int, packed: bool) -> list[Row]:
        """Each text between <cls> and <sep>, in rows of at most `length` tokens: packed end to end, or each
        with rows of its own."""
        encoded = self.tokenizer.encode_batch([row["text"] for row in rows])
        marked = [[self.cls, *ids, self.sep] for ids in encoded]
        if packed:
            return list(pack(marked, length, pad_id=self.collate.pad_id))
        parts = (ids[start : start + length] for ids in marked for start in range(0, len(ids), length))
        return [{"input_ids": np.asarray(part, np.int32)} for part in parts]

    @property
    def corrupt(self) -> Corrupt:
        return self.masking.corrupt


def batched(
    model: nn.Module, rows: Sequence[list[int] | Row], collate: Collate, max_tokens: int
) -> Iterator[tuple[list[int], Batch]]:
    """`TextTask.batched`: batches of at most `max_tokens`, or of one row that is longer."""
    device = next(model.parameters()).device
    whole = [row if isinstance(row, dict) else {"input_ids": row} for row in rows]
    lengths = row_lengths(whole)
    most = max(max_tokens, int(lengths.max(initial=1)))
    for chosen in by_tokens(lengths, None, max_tokens=most):
        batch = collate([whole[i] for i in chosen])
        yield chosen.tolist(), {name: one.to(device) for name, one in batch.items()}


def guesses(output: ModelOutput, labels: Tensor) -> Tensor:
    """What `of_guesses` reads: the nats that the labels cost, those guessed right, and how many they are."""
    assert output.loss is not None
    tokens = (labels != -100).sum().double()
    right = (output.logits.argmax(-1) == labels).sum().double()  # never at -100, which is no token
    return torch.stack([output.loss.double() * tokens, right, tokens])


def of_guesses(nats: float, right: float, tokens: float) -> dict[str, float]:
    """loss (nats a token), perplexity exp(loss) and accuracy of hidden tokens that were guessed."""
    loss = nats / max(tokens, 1)
    return {"loss": loss, "perplexity": exp(loss), "accuracy": right / max(tokens, 1)}


def with_tables(config: ModelConfig, **least: int) -> ModelConfig:
    """`config` with tables of its embedding, such as type_vocab_size, of at least so many rows."""
    sizes = {name: max(getattr(config.embedding, name), number) for name, number in least.items()}
    return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, **sizes))


def check_room(batch_tokens: int, name: str, longest: int) -> None:
    """A batch must have room for the longest row, whose option is called `name`."""
    if batch_tokens < longest:
        raise InputError(f"batch_tokens: expected {name}, {longest}, or more, got {batch_tokens}")


def required(number: int | None, role: str) -> int:
    """The id of a special token that a task cannot do without."""
    if number is None:
        raise InputError(
            f"tokenizer: it has no {role} token, which this task needs; train one with another algorithm"
        )
    return number


def too_long(what: str, length: int, limit: int, way: str) -> InputError:
    """An error for a text of `length` tokens; `way` is what task.too_long can do about it."""
    return InputError(
        f"{what} has {length} tokens, more than task.max_length {limit}; "
        f"raise it, or set task.too_long to {quote(way)}"
    )


def unseen(label: str, labels: Sequence[str]) -> InputError:
    """An error for a label that the training data do not have."""
    return InputError(
        f"label: {quote(label)} was not seen in training, which had {', '.join(map(repr, labels)):.200}"
    )


def exp(value: float) -> float:
    """e^value, infinite rather than an error where no float is large enough."""
    return math.exp(value) if value < 700 else math.inf
