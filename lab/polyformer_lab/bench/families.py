"""Public models compared with transformers, with the same weights: forward, and a training step.

Texts are rows of random tokens, or real texts: with `data`, a directory with IMDB's train.tsv[.gz], and
`tokenizer`, each batch has texts in their order, padded to its longest, so that the share of padding is the
same as in the data.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from polyformer.core.errors import InputError
from polyformer.data import DataConfig, read
from polyformer.data.tokenizers.loading import load_tokenizer
from polyformer.models.checkpoints import FAMILIES, Family
from polyformer.models.presets import model_config
from polyformer.training.recipes.recipe import with_data
from polyformer_lab.bench.passes import PASSES, Batch, Pair, agreement, cases
from polyformer_lab.bench.rows import Bench, Case, Row, check_names
from polyformer_lab.bench.running import runner


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamiliesBench(Bench):
    """Presets of public families, in turn with transformers; dropout in the training step only."""

    presets: tuple[str, ...] = ("bert-base",)
    head: str | None = None  # its kind, such as "classify"; by default the preset's
    layers: int | None = None  # of each stack; by default the preset's
    batch: int = 8
    batches: int = 2  # measured together
    length: int = 512  # the most tokens of a row
    lengths: tuple[int, ...] = ()  # tokens of each random row; by default `batch` rows of `length`
    data: str | None = None  # by default random tokens
    tokenizer: str | None = None
    backward: bool = False
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.data is None) != (self.tokenizer is None):
            raise InputError("data, tokenizer: expected both, for real texts, or neither, for random ones")
        check_names("preset of a public family", self.presets, family_of())

    def rows(self) -> Iterator[Row]:
        """Yield a row for each preset."""
        for preset in self.presets:
            yield Row(preset, preset, functools.partial(self._cases, preset), repeats=self.repeats)

    def _cases(self, preset: str) -> Iterator[Case]:
        models = pair(preset, self)
        batches = texts(self, models.ours.config.vocab_size)
        real = torch.cat([batch["attention_mask"].flatten() for batch in batches]).float().mean().item()
        for batch in batches:
            if models.ours.encoder is not None and models.ours.decoder is not None:
                batch["decoder_input_ids"] = batch["input_ids"][:, : max(1, self.length // 4)]

        def agree() -> dict[str, float]:
            still = Pair(models.ours.eval(), models.theirs.eval())
            return {**agreement(still, batches[0]), "real tokens": real}

        yield from cases(models, batches, PASSES if self.backward else PASSES[:1], agree)


def family_of() -> dict[str, Family]:
    """Return the presets of the families that transformers still has."""
    able = [FAMILIES[name] for name in FAMILIES if not FAMILIES[name].removed]
    return {preset: family for family in able for preset in family.sizes}


def pair(preset: str, config: FamiliesBench) -> Pair:
    """Return the preset with random weights."""
    model = model_config(preset)
    if config.layers is not None:
        model = model.override("num_hidden_layers", config.layers)
    return Pair.of(family_of()[preset], model, config.head)


def texts(config: FamiliesBench, vocabulary: int) -> list[Batch]:
    """Return the batches, each padded to its longest text."""
    torch.manual_seed(1)
    if config.data is None or config.tokenizer is None:
        lengths = config.lengths or (config.length,) * config.batch
        size, most = len(lengths), min(vocabulary, 1000)
        rows = [torch.randint(5, most, (length,)) for _ in range(config.batches) for length in lengths]
    else:
        size, path = config.batch, with_data({"path": "train.tsv"}, config.data)["path"]
        table: Any = read(DataConfig(format="tsv", header=("label", "rating", "text")), ("text",), path)
        chosen = [table[number]["text"] for number in range(config.batches * size)]
        encoded = load_tokenizer(config.tokenizer).encode_batch(chosen)
        rows = [torch.tensor(ids[: config.length]).clamp_max(vocabulary - 1) for ids in encoded]
    batches = []
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        mask = pad_sequence([torch.ones_like(row) for row in some], batch_first=True)
        batches.append({"input_ids": pad_sequence(some, batch_first=True), "attention_mask": mask})
    return batches


run = runner(FamiliesBench)
