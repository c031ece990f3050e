"""Language modelling: predict the next token, or tokens in a random order.

    kind           row                         loss
    lm             <bos> text <eos>, packed    cross-entropy of each next token
    permuted_lm    <cls> text <sep>, packed    cross-entropy of the tokens at the end of the order

**lm**: measured by perplexity, per token and per word. Packed documents do not attend to each other. With
`feed: in_order`, the rows of a batch continue the texts of the previous batch (`data.rows.packing`), as
required by recurrent models; the last token of a row then predicts the first token of the next row.

**permuted_lm**: each token is predicted from all before it in the order, which is new for each row in every
epoch. Only the last tokens of it are predicted, a share 1 / K of the row, because the first ones have too
little to be predicted from; K = 6 (Yang et al. 2019, section 2.3, "partial prediction", and appendix A.4.2).
All others are known to each other. No token is masked, and the text that the model reads is as it is; the
query stream begins with the vector of <mask>. See `polyformer.models.architectures.two_streams`.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import nn

from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED, batch_to_device
from polyformer.core.ranges import NonNegativeInt, PositiveShare
from polyformer.data import Tokenizer, pack
from polyformer.data.prepared.rows import MappedBatches, MappedSegments, PreparedText
from polyformer.data.rows import Row
from polyformer.data.rows.neighbours import Neighbours
from polyformer.data.rows.packing import Segments, rows_at
from polyformer.models.architectures import Transformer, TwoStreams
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import HeadConfig, LanguageModelConfig, SemiparametricConfig
from polyformer.training import share_rows
from polyformer.training.task import SINGLE_PROCESS, Workers
from polyformer.training.tasks.base import HeldOut, ModelLoss, Rows, TrainingBatches
from polyformer.training.tasks.masked import DocumentRows, TokenPredictions
from polyformer.training.tasks.text import (
    STREAMED_ROWS,
    Continuation,
    NextTokens,
    Perplexity,
    TextArchitecture,
    TextRows,
    TextTask,
    TextTaskConfig,
    loss_total,
    required,
    text_counts,
    text_metrics,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModellingConfig(TextTaskConfig):
    """Language model: predict the next token of a text."""

    feed: Literal["packed", "in_order"] = "packed"  # rows in random order, or continuing their texts
    row_length: int = 256  # tokens per row: the maximum context without a memory
    overlap: int = 1  # tokens that a held-out row repeats from the previous row, as uncounted context
    ngram_order: NonNegativeInt = 0  # of the n-gram model for comparison; 0 for none
    prompt: str = ""  # of the sample at the end of a run
    neighbours: tuple[str, ...] = ()  # folders from `polyformer datastore neighbours` for the texts

    kind: ClassVar[str] = "lm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.overlap < self.row_length:
            raise InputError(
                f"overlap: expected 1 to {self.row_length - 1} (row_length - 1), got {self.overlap}"
            )

    def resolve(self, rows: Rows) -> Self:
        """Return this with absolute paths of the neighbour folders, so that a run can be resumed anywhere."""
        if isinstance(rows, PreparedText) and self.ngram_order:
            raise InputError(
                "ngram_order: n-grams are counted in memory, and prepared text may not fit into it; set 0"
            )
        folders = tuple(str(Path(folder).absolute()) for folder in self.neighbours)
        return dataclasses.replace(self, neighbours=folders)


class Documents(TextRows):
    """Rows of documents, each <bos> text <eos>: packed, or in segments that continue each other."""

    config: LanguageModellingConfig
    frame: tuple[int, int]

    def __init__(self, config: LanguageModellingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.bos, self.eos = required(tokenizer.bos_id, "<bos>"), required(tokenizer.eos_id, "<eos>")
        self.frame = self.bos, self.eos
        self.continues = config.feed == "in_order"
        self.rows_per_batch = config.batch_tokens // config.row_length

    @cached_property
    def neighbours(self) -> Neighbours | None:
        """Return the tokens that followed the nearest contexts of each token; None if not used."""
        folders = self.config.neighbours
        return Neighbours(folders, self.tokenizer) if folders else None

    def documents(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the token ids of every text, between <bos> and <eos>."""
        return [[self.bos, *ids, self.eos] for ids in self.encoded(rows)]

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return packed rows of exactly `row_length` tokens; a shorter text gives one padded row."""
        documents = self.documents(rows)
        return self._packed(documents, last="drop") or self._packed(documents)

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return packed rows, the last of them padded, each with `overlap` tokens of the previous row."""
        return self._packed(self.documents(rows), overlap=self.config.overlap)

    def _packed(self, documents: Sequence[Sequence[int]], **options: Any) -> list[Row]:
        """Return rows of `pack`, with the neighbours of their tokens if the task uses them."""
        length, pad = self.config.row_length, self.collate.pad_id
        rows: list[Row] = list(pack(documents, length, pad_id=pad, **options))
        if self.neighbours is not None:
            near = self.neighbours.of(documents)
            ends = itertools.accumulate(map(len, documents), initial=0)
            places = [range(start, stop) for start, stop in itertools.pairwise(ends)]
            for row, where in zip(rows, pack(places, length, pad_id=-1, **options)):
                row["neighbour_ids"] = rows_at(near, where["input_ids"])
        return rows

    def training_batches(self, rows: Any, seed: int) -> TrainingBatches:
        """Return packed rows, or with `feed: in_order` segments of continued documents."""
        if not self.continues or isinstance(rows, PreparedText):
            return super().training_batches(rows, seed)
        if not hasattr(rows, "__len__"):
            raise InputError("task.feed: 'in_order' lays out all documents, and these data are streamed")
        return self._segments(rows, self.rows_per_batch, seed)

    def held_out(self, rows: Rows, side_by_side: int | None = None) -> HeldOut:
        """Return held-out batches; in order, whole documents in `side_by_side` rows."""
        if not self.continues:
            return super().held_out(rows)
        kept = list(rows if hasattr(rows, "__len__") else itertools.islice(rows, STREAMED_ROWS))
        segments = self._segments(kept, side_by_side or self.rows_per_batch)
        return HeldOut(segments, self.counted(rows, kept))

    def mapped_batches(self, text: PreparedText, seed: int) -> MappedBatches | MappedSegments:
        """Return batches of prepared text; in order, continued documents."""
        if self.config.neighbours:
            raise InputError("task.neighbours: not with prepared text; name the text itself as data")
        if not self.continues:
            return super().mapped_batches(text, seed)
        if len(text.parts) > 1:
            raise InputError("task.feed: 'in_order' reads a single folder of prepared text, not a mixture")
        length, rows = self.config.row_length, self.rows_per_batch
        return MappedSegments(self.framed(text)[0], length, rows, seed, self.collate.pad_id)

    def _segments(self, rows: Sequence[Row], side_by_side: int, seed: int | None = None) -> Segments:
        """Return segments of the documents of `rows`, shuffled if a seed is given."""
        pad = self.collate.pad_id
        documents = self.documents(list(rows))
        near = None if self.neighbours is None else self.neighbours.of(documents)
        length, shuffle = self.config.row_length, seed is not None
        return Segments(documents, length, side_by_side, seed or 0, shuffle, pad, near)

    def count(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the words and bytes of the text; empty if the tokenizer loses part of it."""
        return text_counts(self.tokenizer, rows)


class TextPerplexity(Perplexity):
    """The metrics from `nats`, the sum of -ln P over every held-out token and <eos>:

    loss             nats / tokens
    perplexity       exp(loss), per token: comparable only under the same tokenizer
    word_perplexity  exp(nats / words), as published for WikiText. Words are separated by white space,
                     and the end of every line counts as one more (the <eos> of the corpus)
    bits_per_byte    nats / ln 2 / bytes of UTF-8 (of the text in NFC)

    The last two are omitted if the tokenizer loses part of the text, because its tokens then carry less
    information than the words. The Unicode form of a character (NFC or NFD) is not part of the text.
    """

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class; the last two only with `counts`."""
        nats, tokens = totals
        return text_metrics(nats, tokens, counts)


class RecurrentPerplexity(TextPerplexity):
    """The same metrics of texts that continue, for a recurrent model with its state."""

    @torch.no_grad()
    def measure(self, model: nn.Module, held: HeldOut, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return metrics; a recurrent model reads segments in order, each process its rows."""
        if not getattr(model, "supports_recurrence", False):
            return super().measure(model, held, workers)
        device = next(model.parameters()).device
        total, state = torch.zeros(self.sums, dtype=torch.float64, device=device), None
        for _, whole in held.batches.epoch(0):
            batch = {name: share_rows(x, workers.rank, workers.world) for name, x in whole.items()}
            if not len(batch["input_ids"]):
                break  # every batch has fewer rows than processes
            output = model(**batch_to_device(batch, device), state=state, use_cache=True)
            total, state = total + loss_total(output.loss, self.weight(batch)), output.state
        return self.values(workers.add(total).tolist(), held.counts)


class LanguageModelling(TextTask, Continuation, config=LanguageModellingConfig):
    """Language modelling, measured by `TextPerplexity`."""

    config: LanguageModellingConfig
    rows: Documents
    command = "generate"

    def __init__(self, config: LanguageModellingConfig, tokenizer: Tokenizer):
        head: HeadConfig = SemiparametricConfig() if config.neighbours else LanguageModelConfig()
        rows, objective = Documents(config, tokenizer), NextTokens()
        metrics = RecurrentPerplexity if rows.continues else TextPerplexity
        super().__init__(
            config,
            tokenizer,
            rows=rows,
            architecture=TextArchitecture(
                "decoder",
                head,
                tokenizer,
                config.row_length,
                packs_documents=True,
                change=partial(checked, task=config),
            ),
            objective=objective,
            metrics=metrics(objective.weight),
        )

    def measure_rows(
        self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS
    ) -> dict[str, float]:
        """Return metrics; in order, the text is read as one row.

        In this case the metrics include the number of predicted tokens, and the memory sizes.
        """
        if not self.rows.continues:
            return super().measure_rows(model, rows, workers)
        held = self.rows.held_out(rows, side_by_side=1)
        tokens = sum(self.objective.weight(batch) for _, batch in held.batches.epoch(0))
        memory = getattr(getattr(model, "decoder", None), "memory", None)
        sizes = {"memory_length": 0} if memory is None else memory.sizes
        return {**self.metrics.measure(model, held, workers), "tokens": tokens, **sizes}

    def start(self, prompt: str) -> list[int]:
        """Return the token ids of a document that starts with `prompt`."""
        return [self.rows.bos, *self.tokenizer.encode(prompt)]


def checked(config: ModelConfig, task: LanguageModellingConfig) -> ModelConfig:
    """Return `config`, of a model for the task.

    Raises `InputError` for a memory with rows in random order, and unless both or neither of neighbours and
    the head that reads them are used.
    """
    if bool(task.neighbours) != isinstance(config.head, SemiparametricConfig):
        raise InputError(
            "task.neighbours: it and the head 'semiparametric' go together; name the folders that "
            "polyformer datastore neighbours made of the texts, or leave both out"
        )
    stack = config.decoder
    if stack is not None and stack.memory.segments and task.feed != "in_order":
        raise InputError(
            "memory: rows in random order leave nothing to remember; set task.feed to 'in_order'"
        )
    return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class PermutedModellingConfig(TextTaskConfig):
    """Permuted language model (XLNet): predict tokens in a random order, with two streams of attention."""

    row_length: int = 128  # tokens per row
    packed: bool = True  # False: no row contains parts of two documents
    predicted: PositiveShare = 1 / 6  # of the tokens of a row: the last ones of the order

    kind: ClassVar[str] = "permuted_lm"
    paper: ClassVar[str] = "Yang et al. 2019 (XLNet), section 2"


class PermutedRows(DocumentRows):
    """Rows of documents with a random order of their tokens."""

    config: PermutedModellingConfig
    corrupts_held_out = True

    def __init__(self, config: PermutedModellingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.corrupt = self.in_order

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of `prepare_held_out`."""
        return self.prepare_held_out(rows)

    def in_order(self, row: Row, generator: np.random.Generator) -> Row:
        """Return `row` with the `ranks` of its tokens and with `labels`, the tokens of rank 1 or more."""
        ids = np.asarray(row["input_ids"])
        candidates = np.flatnonzero(np.isin(ids, self.tokenizer.ordinary_ids))
        count = min(len(candidates), max(1, round(self.config.predicted * len(candidates))))
        last = generator.permutation(candidates)[:count]
        ranks, labels = np.zeros_like(ids), np.full_like(ids, IGNORED)
        ranks[last] = np.arange(1, count + 1)
        labels[last] = ids[last]
        return {**row, "ranks": ranks, "labels": labels}


class TwoStreamLoss(ModelLoss):
    """The loss of a model with both streams of attention. mask_id: the token of the query stream."""

    plain = False

    def __init__(self, mask_id: int):
        self.mask_id = mask_id

    def training_module(self, model: Transformer, run: Path | None = None) -> nn.Module:
        """Return the model with both streams."""
        return TwoStreams(model, self.mask_id).train(model.training)


class PermutedModelling(TextTask, config=PermutedModellingConfig):
    """Permuted language modelling, with metrics over the predicted tokens.

    The metrics are loss (nats per token), perplexity exp(loss) and accuracy.
    """

    def __init__(self, config: PermutedModellingConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=PermutedRows(config, tokenizer),
            architecture=TextArchitecture(
                "encoder",
                LanguageModelConfig(bias=True),
                tokenizer,
                config.row_length,
                packs_documents=config.packed,
            ),
            objective=TwoStreamLoss(required(tokenizer.mask_id, "<mask>")),
            metrics=TokenPredictions(),
        )
