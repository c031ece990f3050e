"""Passes of our models and of transformers' models with the same weights: training, families.

Both state the agreement of the outputs, and the speed of forward, or of forward and backward.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from polyformer.core.errors import InputError
from polyformer.data import DataConfig, read
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import FAMILIES, Family, from_transformers
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.training.recipes.recipe import with_data
from polyformer_lab.bench.rows import OURS, AbsentError, Bench, Case, DeviceBench, Row, check_names
from polyformer_lab.bench.running import runner

Batch = dict[str, Tensor]
Read = Callable[[Any], Tensor]
"""A function from a model's output to the tensor that is compared and trained."""

TRANSFORMERS = "transformers"
PASSES = "forward", "forward and backward"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model in our version, and in the version of transformers if it is installed."""

    ours: Any
    theirs: Any = None

    @classmethod
    def of(cls, family: Family, config: ModelConfig, head: str | None = None, **place: Any) -> "Pair":
        """Return a model of a family with random weights; `head`: its kind, if it differs from `config`."""
        torch.manual_seed(0)
        try:
            import transformers
        except ImportError:
            return cls(Transformer(config).to(**place))
        task = family.task({}, head or config.head)
        described, _ = family.hub_config(dataclasses.replace(config, head=family.tasks[task].head))
        hub = transformers.AutoConfig.for_model(**described)
        theirs = getattr(transformers, family.class_prefix + task)(hub)
        return cls(from_transformers(theirs).to(**place), theirs.to(**place))

    def transformers_model(self) -> Any:
        """Return the model of transformers; raises `AbsentError` without transformers."""
        if self.theirs is None:
            raise AbsentError("transformers is not installed (pip install 'polyformer[peers]')")
        return self.theirs

    @property
    def makers(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Return the functions that make both models, by name."""
        return {TRANSFORMERS: self.transformers_model, OURS: lambda: self.ours}


def gpt2_pair(bench: Any, positions: int, dropout: float = 0.0, **place: Any) -> Pair:
    """Return both models of GPT-2's shape with random weights.

    bench: has the numbers `layers`, `hidden_size`, `heads` and `vocab_size`. place: as `Module.to` takes it.
    """
    sizes = {
        "num_hidden_layers": bench.layers,
        "hidden_size": bench.hidden_size,
        "intermediate_size": 4 * bench.hidden_size,
        "num_attention_heads": bench.heads,
        "vocab_size": bench.vocab_size,
        "dropout": dropout,
        "max_position_embeddings": positions,
    }
    return Pair.of(FAMILIES["gpt2"], model_config("gpt2", sizes), **place)


def predicted(output: Any) -> Tensor:
    """Return a model's predictions, or its last hidden states."""
    for name in ("logits", "prediction_logits", "start_logits", "last_hidden_state"):
        prediction = getattr(output, name, None)
        if prediction is not None:
            return prediction
    raise AssertionError("no predictions")


@torch.no_grad()
def agreement(pair: Pair, batch: Batch, read: Read = predicted) -> dict[str, float]:
    """Return the largest difference of outputs at real tokens, and the share that agrees to 1e-3."""
    mine, other = (read(make()(**batch)) for make in pair.makers.values())
    mask = batch.get("attention_mask")
    if mask is not None and mine.shape[:2] == mask.shape:
        mine, other = mine[mask.bool()], other[mask.bool()]
    difference = (mine - other).abs().amax(-1)
    return {"differs by": difference.max().item(), "agrees": (difference < 1e-3).float().mean().item()}


def cases(
    pair: Pair,
    batches: Sequence[Batch],
    passes: Sequence[str],
    agree: Callable[[], dict[str, float]] | None = None,
    read: Read = predicted,
) -> Iterator[Case]:
    """Yield the passes over the batches; `agree`: the agreement of transformers' outputs with ours."""

    def call(make: Callable[[], nn.Module], backward: bool) -> Callable[[], None]:
        model = make()

        def run() -> None:
            model.train(backward)
            with torch.set_grad_enabled(backward):
                for batch in batches:
                    output = read(model(**batch))
                    if backward:
                        model.zero_grad(set_to_none=True)
                        output.square().mean().backward()

        return run

    tokens = sum(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum() for batch in batches)
    for name in passes:
        contenders = {
            key: functools.partial(call, make, name != PASSES[0]) for key, make in pair.makers.items()
        }
        facts = {TRANSFORMERS: agree} if agree is not None and name == passes[0] else {}
        yield Case(contenders, name, work={"tokens": float(tokens)}, facts=facts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingBench(DeviceBench):
    """Forward and backward of a language model of GPT-2's shape, compared with transformers.

    A training step (forward with loss, backward, and the optimizer's step if it is named); random weights and
    tokens.
    """

    batch: int = 2
    length: int = 512
    layers: int = 12
    hidden_size: int = 768
    heads: int = 12
    vocab_size: int = 50257
    dropout: float = 0.0  # of both models, everywhere in GPT-2 except in the attention weights
    optimizer: Literal["none", "adamw"] = "none"  # adamw: torch's fused one
    autocast: Literal["no", "bfloat16", "float16"] = "no"  # of the forward pass and the loss
    repeats: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.heads:
            raise InputError(
                f"hidden_size: expected a multiple of {self.heads} heads, got {self.hidden_size}"
            )

    def rows(self) -> Iterator[Row]:
        """Yield the only row."""
        end = "" if self.optimizer == "none" else f" with {self.optimizer}"
        what = f"{self.layers} layers of {self.hidden_size}, training step{end}"
        what = f"{what}, {self.batch} x {self.length} tokens"
        yield Row("training", what, self._cases, repeats=self.repeats)

    def _cases(self) -> Iterator[Case]:
        pair = gpt2_pair(self, max(1024, self.length), self.dropout, **self.place)
        tokens = self.batch * self.length
        ids = torch.randint(0, self.vocab_size, (self.batch, self.length), device=self.device)
        # Products with weights: forward, and twice the number backward. Attention, a few per cent at these
        # lengths, is left out.
        weights = 12 * self.layers * self.hidden_size**2 + self.vocab_size * self.hidden_size
        yield Case(
            {name: functools.partial(self._step, make, ids) for name, make in pair.makers.items()},
            work={"tokens": tokens, "TFLOP": 6.0 * weights * tokens / 1e12},
            flop=self.flop(**{OURS: 6.0 * weights * tokens}),
        )

    def _step(self, make: Callable[[], nn.Module], ids: torch.Tensor) -> Callable[[], None]:
        model = make().train()
        optimizer = None
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        autocast: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.autocast != "no":
            autocast = torch.autocast(ids.device.type, getattr(torch, self.autocast))

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with autocast:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if optimizer is not None:
                optimizer.step()

        return step


run_training = runner(TrainingBench)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamiliesBench(Bench):
    """Public models compared with transformers, with the same weights: forward, and a training step.

    Texts are rows of random tokens, or real texts: with `data`, a directory with IMDB's train.tsv[.gz], and
    `tokenizer`, each batch has texts in their order, padded to its longest, so that the share of padding is
    the same as in the data.

    Presets of public families, in turn with transformers; dropout in the training step only.
    """

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


run_families = runner(FamiliesBench)
