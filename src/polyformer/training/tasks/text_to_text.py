"""T5's mixture: several tasks as text to text, distinguished by a prefix, learned by one model.

    sst2 sentence: a gripping film            ->  positive
    translate English to German: Go.          ->  Geh.
    summarize: The long text ...              ->  A short one.
    The cat <0> the <1> .                     ->  <0> sat on <1> mat          (span corruption, no prefix)

Examples are drawn in proportion to the numbers of examples of the tasks, each limited to `limit`, or
more uniformly with a `temperature` (`data.rows`). A predicted label counts only if it matches
exactly. Raffel et al. 2020, sections 2.4, 3.1.4 and 3.5.2.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import PositiveInt
from polyformer.data import Batches, DataConfig, Splits, Tokenizer, TokenizerConfig, by_tokens, load
from polyformer.data.formats.published import rouge
from polyformer.data.rows import Batch, Concatenation, Mixture, Row, mixing_rates, row_lengths
from polyformer.data.rows.noising import (
    SENTINELS,
    add_sentinels,
    corrupt_spans,
    corrupted_lengths,
    pieces,
    sentinel_ids,
    span_counts,
    text_length,
)
from polyformer.models.architectures import Transformer
from polyformer.models.generation import BeamConfig
from polyformer.training.task import SINGLE_PROCESS, Workers
from polyformer.training.tasks.base import HeldOut, Metrics, Rows, label_count
from polyformer.training.tasks.seq2seq import (
    SequenceToSequence,
    SequenceToSequenceConfig,
    TruncatedTexts,
    seq2seq_architecture,
)
from polyformer.training.tasks.text import exp, loss_total


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixturePart(Config):
    """A task of a mixture: its data have the columns source and target, or text for span corruption."""

    form: Literal["classify", "translate", "summarize", "spans"] = "classify"
    prefix: str = ""  # before every source
    data: DataConfig = DataConfig()
    words: dict[str, str] = dataclasses.field(default_factory=dict)  # replacements of the targets

    def __post_init__(self) -> None:
        if self.form == "spans" and (self.prefix or self.words):
            raise InputError("prefix, words: texts whose spans are removed have none; leave them out")

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the columns that are read."""
        return ("text",) if self.form == "spans" else ("source", "target")

    def data_in_folder(self, folder: str) -> DataConfig:
        """Return the data with paths in `folder`."""
        if self.data.path is None or self.data.streaming:
            raise InputError("parts: expected data with a path, read in memory; set data.path")
        paths = {role: getattr(self.data, role) for role in ("path", "validation", "test")}
        inside = {
            role: path if path.startswith("hub:") else str(Path(folder) / path)
            for role, path in paths.items()
            if path is not None
        }
        return dataclasses.replace(self.data, **inside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextToTextConfig(SequenceToSequenceConfig):
    """T5's mixture: several tasks at once, each as text to text with a separate prefix."""

    folder: str = ""  # folder of the files of the parts
    parts: dict[str, MixturePart] = dataclasses.field(default_factory=dict)
    limit: int = 2**16  # K: maximum number of examples that count per part
    temperature: float = 1.0  # T
    epoch_size: PositiveInt | None = None  # examples per epoch; None: the sum of the counted examples
    max_length: Annotated[int, Ge(2)] = 128  # tokens of a source, including <eos>; longer ones are cut
    max_target: Annotated[int, Ge(2)] = 64  # tokens of a target, including <eos>; longer ones are cut
    density: float = 0.15  # fraction of tokens that span corruption removes
    mean_span: float = 3.0  # mean length of a span, in tokens
    beam: BeamConfig = BeamConfig(num_beams=1)

    needs: ClassVar[tuple[str, ...]] = ("task", "source", "target")
    kind: ClassVar[str] = "text_to_text"
    paper: ClassVar[str] = "Raffel et al. 2020, sections 2.4 and 3.5.2"

    def __post_init__(self) -> None:
        super().__post_init__()
        mixing_rates([1], self.limit, self.temperature)
        span_counts(self.text_length, self.density, self.mean_span)

    @property
    def text_length(self) -> int:
        """Return the number of tokens of a text before spans are removed."""
        return text_length(max(3, self.max_length), self.density, self.mean_span)

    @property
    def own_sources(self) -> dict[str, tuple[DataConfig, tuple[str, ...]]]:
        """Return the data of each part, and the columns that are read."""
        if not self.parts:
            raise InputError("parts: expected a task or more; name them in a recipe, as `t5` does")
        return {name: (part.data_in_folder(self.folder), part.needs) for name, part in self.parts.items()}

    @property
    def own_data(self) -> Splits:
        """Return the rows of all parts, {task, source, target}, with prefixes and replaced targets."""
        splits = [
            [None if rows is None else self._rows(name, rows) for rows in load(data, needs)]
            for name, (data, needs) in self.own_sources.items()
        ]
        train, validation, test = (
            [row for rows in column if rows for row in rows] for column in zip(*splits)
        )
        return Splits(train, validation or None, test or None)  # type: ignore[arg-type]

    def _rows(self, name: str, rows: Rows) -> list[Row]:
        part = self.parts[name]
        if part.form == "spans":
            return [{"task": name, "source": part.prefix + row["text"], "target": ""} for row in rows]
        targets = [row["target"] for row in rows]
        if part.words and (strange := {*targets} - {*part.words}):
            raise InputError(f"parts.{name}.words: no word for {quote(min(strange))}")
        return [
            {"task": name, "source": part.prefix + row["source"], "target": part.words.get(target, target)}
            for row, target in zip(rows, targets)
        ]

    def resolve(self, rows: Rows) -> Self:
        """Return this with an absolute folder, so that a run can be resumed anywhere."""
        return dataclasses.replace(self, folder=str(Path(self.folder).absolute()))

    def texts(self, rows: Rows) -> Iterator[str]:
        """Return the sources and targets of all parts."""
        return (text for row in rows for text in (row["source"], row["target"]) if text)

    def tokenizer(self, config: TokenizerConfig, rows: Rows) -> Tokenizer:
        """Return the tokenizer, with a sentinel for every span if there is span corruption."""
        tokenizer = super().tokenizer(config, rows)
        if all(part.form != "spans" for part in self.parts.values()):
            return tokenizer
        spans = span_counts(self.text_length, self.density, self.mean_span)[1]
        return add_sentinels(tokenizer, max(SENTINELS, spans))


class MixtureRows(TruncatedTexts):
    """Rows of all parts of a mixture; `names` are the names of the parts."""

    config: TextToTextConfig

    def __init__(self, config: TextToTextConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.names = list(config.parts)
        self.sentinels: list[int] = []
        if any(part.form == "spans" for part in config.parts.values()):
            spans = span_counts(config.text_length, config.density, config.mean_span)[1]
            self.sentinels = sentinel_ids(tokenizer, spans)

    def grouped(self, rows: Rows) -> dict[str, list[Row]]:
        """Return the rows of each part, in the order of the parts."""
        groups: dict[str, list[Row]] = {name: [] for name in self.names}
        for row in rows:
            groups[row["task"]].append(row)
        return groups

    def prepare_part(self, name: str, rows: Sequence[Row]) -> list[Row]:
        """Return token ids of a part; for spans, texts with placeholder labels of the final length."""
        if self.config.parts[name].form != "spans":
            return [{**row, "spans": False} for row in self.prepare_held_out(rows)]
        texts = pieces(self.tokenizer.encode_batch([row["source"] for row in rows]), self.config.text_length)
        shape = self.config.density, self.config.mean_span
        targets = [np.zeros(corrupted_lengths(len(text), *shape)[1], np.int32) for text in texts]
        return [{"input_ids": text, "labels": labels, "spans": True} for text, labels in zip(texts, targets)]

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return pairs of all parts, one part after the other."""
        return [row for name, part in self.grouped(rows).items() for row in self.prepare_part(name, part)]

    def corrupt_spans(self, row: Row, generator: np.random.Generator) -> Row:
        """Remove spans of a text; other rows are unchanged. Drops entries that no model reads."""
        kept = {name: value for name, value in row.items() if name != "spans"}
        if not row["spans"]:
            return kept
        options = {"density": self.config.density, "mean_span": self.config.mean_span}
        ids, labels = corrupt_spans(
            row["input_ids"], generator, sentinel_ids=self.sentinels, eos_id=self.eos, **options
        )
        return {**kept, "input_ids": ids, "labels": labels}

    def training_batches(self, rows: Any, seed: int) -> Any:
        """Return batches of the mixture, and note its rates."""
        parts = [self.prepare_part(name, part) for name, part in self.grouped(rows).items()]
        empty = [name for name, part in zip(self.names, parts) if not part]
        if empty:
            raise InputError(f"parts.{empty[0]}: no example to learn from; name other data, or leave it out")
        sizes, limit = [len(part) for part in parts], self.config.limit
        rates = mixing_rates(sizes, limit, self.config.temperature)
        shares = ", ".join(
            f"{name} {rate:.1%} ({size:,} examples)" for name, rate, size in zip(self.names, rates, sizes)
        )
        self.notes.append(f"mixture: {shares}")
        size = self.config.epoch_size or sum(min(size, limit) for size in sizes)
        plan = partial(by_tokens, max_tokens=self.batch_tokens)
        return Mixture(parts, rates, size, plan, self.collate, seed, self.corrupt_spans)

    def held_out(self, rows: Rows) -> HeldOut:
        """Return batches of a single part each, with its number."""
        parts = []
        for number, (name, part) in enumerate(self.grouped(rows).items()):
            prepared = [{**row, "part": number} for row in self.prepare_part(name, part)]
            longest = int(row_lengths(prepared).max(initial=1))
            plan = partial(by_tokens, max_tokens=max(self.batch_tokens, longest))
            parts.append(Batches(prepared, plan, self.collate, shuffle=False, corrupt=self.corrupt_spans))
        return HeldOut(Concatenation(parts), {})


class PartPerplexities(Metrics):
    """The metrics loss (nats per target token) and perplexity over all parts, and NAME_loss per part."""

    def __init__(self, names: Sequence[str]):
        self.names, self.sums = names, 2 * len(names)

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss and the number of labels, of each part."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "part"}
        totals = torch.zeros(len(self.names), 2, dtype=torch.float64, device=batch["part"].device)
        totals[int(batch["part"][0])] = loss_total(model(**inputs).loss, label_count(inputs))
        return totals.flatten()

    def values(self, totals: list[float], counts: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        nats, labels = totals[::2], totals[1::2]
        loss = sum(nats) / max(sum(labels), 1)
        each = {f"{name}_loss": part / count for name, part, count in zip(self.names, nats, labels) if count}
        return {"loss": loss, "perplexity": exp(loss), **each}


class TextToText(SequenceToSequence, config=TextToTextConfig):
    """T5's mixture, measured by `PartPerplexities`.

    `finish` adds NAME_accuracy (exact matches of targets) and NAME_majority (the accuracy of the most
    frequent target), NAME_bleu, or NAME_rouge1, _rouge2 and _rougeL.
    """

    config: TextToTextConfig
    rows: MixtureRows

    def __init__(self, config: TextToTextConfig, tokenizer: Tokenizer):
        rows = MixtureRows(config, tokenizer)
        longest = max(config.max_length, config.max_target)
        super().__init__(
            config,
            tokenizer,
            rows=rows,
            architecture=seq2seq_architecture(tokenizer, longest, label_smoothing=0.0),
            metrics=PartPerplexities(rows.names),
        )

    def finish(self, model: nn.Module, rows: Rows, workers: Workers = SINGLE_PROCESS) -> dict[str, float]:
        """Return the metrics of the texts generated for the sources of each part, according to its form."""
        assert isinstance(model, Transformer)
        scores: dict[str, float] = {}
        for name, part in self.rows.grouped(rows).items():
            form = self.config.parts[name].form
            if part and form != "spans":
                texts = self.translated(model, [row["source"] for row in part], workers)
                values = measured(form, texts, [row["target"] for row in part])
                scores |= {f"{name}_{metric}": value for metric, value in values.items()}
        return scores


def measured(form: str, texts: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """Return metrics of `texts`: accuracy and the accuracy of the most frequent target, BLEU, or ROUGE."""
    if form == "translate":
        import sacrebleu

        return {"bleu": sacrebleu.corpus_bleu([*texts], [[*targets]]).score}
    if form == "summarize":
        return rouge(texts, targets)
    right = sum(text == target for text, target in zip(texts, targets, strict=True))
    most = max(list(targets).count(target) for target in {*targets})
    return {"accuracy": right / len(targets), "majority": most / len(targets)}
