"""Small models of every kind, in float64, trained on texts made from a seed: alone or divided."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyformer.core.config import Config
from polyformer.core.files import read_tensors
from polyformer.models.presets import create_model
from polyformer.training.config import ParallelConfig, ReportingConfig, SavingConfig, TrainingConfig
from polyformer.training.loop import Result, Training, train
from polyformer.training.metrics import read_metrics
from polyformer.training.optimizers import OptimizerConfig, ScheduleConfig
from polyformer.training.task import Batch, share

WORDS, LENGTH = 23, 12
FINAL = "final.safetensors"

SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}

DECODER: dict[str, Any] = {"preset": "decoder-tiny", **SMALL}
ENCODER: dict[str, Any] = {"preset": "encoder-tiny", "head": "masked", **SMALL}

KINDS: dict[str, dict[str, Any]] = {
    "decoder": {**DECODER, "position": "rope", "feedforward": "gated", "num_key_value_heads": 2},
    "encoder": {**ENCODER, "position": "alibi"},
    "encoder_decoder": {
        "preset": "transformer-tiny",
        "special.bos": 1,
        **SMALL,
        "vocab_size": 24,
        "position": "t5",
        "head.label_smoothing": 0.1,
    },
    "untied": {
        "preset": "transformer-tiny",
        "special.bos": 1,
        **SMALL,
        "embedding.tied": False,
        "embedding.shared": False,
        "head.bias": True,
        "head.frozen_bias": True,
    },
    "experts": {**DECODER, "feedforward": "experts(experts=4, shared_expert=gated)"},
    "windows": {**DECODER, "attention": "Window(8)", "length": 61},
    "heads": {
        **DECODER,
        "attention": "PerHead([Window(4), Strided(3), Window(4), Window(9)])",
        "position": "t5",
    },
    "shaw": {**ENCODER, "position": "shaw(clip=3)", "block": "post"},
    "albert": {**ENCODER, "num_hidden_groups": 1, "embedding.size": 8},
    "reversible": {**DECODER, "block": "reversible"},
    "projected": {**ENCODER, "attention": "linformer(max_length=16, k=4, sharing=layer)"},
    "frozen": {**DECODER, "frozen": ("tokens", "decoder.layers.0.attention.query")},
}

DROPPED: dict[str, Any] = {**DECODER, "num_hidden_layers": 4, "decoder.layerdrop": 0.5}
"""Of which each process leaves out other layers: one process has nothing that is equal."""

UNDIVIDED: dict[str, dict[str, Any]] = {
    "one key head": {**DECODER, "num_key_value_heads": 1},
    "linformer": {**ENCODER, "attention": "linformer"},
    "odd": {**DECODER, "intermediate_size": 23},
    "deberta": {**ENCODER, "position": "deberta"},
    "memory": {**DECODER, "memory": "recurrent", "position": "rope"},
}
"""What tensor parallelism refuses."""


class Texts:
    """Batches of random texts: ragged, one without a label, and an odd number of them in an epoch."""

    best, supports_context_parallel = "loss", True
    direction: Literal["min", "max"] = "min"

    def __init__(self, length: int = LENGTH, batches: int = 7, empty: int | None = 2) -> None:
        self.length, self.count, self.empty = length, batches, empty

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        for number in share(range(self.count), skip, rank, world):
            yield self.batch(1000 * epoch + number, empty=number == self.empty)

    def batch(self, seed: int, empty: bool = False) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, WORDS, (1 + seed % 3, self.length), generator=generator)
        kept = torch.rand(ids.shape, generator=generator) < 0.7
        kept[0, 1] = True
        return {"input_ids": ids, "labels": ids.masked_fill(~kept | empty, -100)}

    def weight(self, batch: Batch) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(**batch).loss

    def evaluate(self, model: nn.Module, accelerator: Any) -> dict[str, float]:
        """The mean loss, and how many tokens of a text this process leaves to others."""
        total, others = torch.zeros(2, dtype=torch.float64), 0
        for seed in range(90, 93)[accelerator.process_index :: accelerator.num_processes]:
            output = model(**self.batch(seed))
            total += torch.tensor([float(output.loss), 1.0], dtype=torch.float64)
            slots = getattr(output, "slots", None)
            others = 0 if slots is None else self.length - len(slots)
        total = accelerator.reduce(total, "sum") if accelerator.num_processes > 1 else total
        return {"loss": float(total[0] / total[1]), "others": others}


def build(kind: str) -> nn.Module:
    """The model of `kind`, the same in every process."""
    options = dict({**KINDS, **UNDIVIDED, "dropped": DROPPED}[kind])
    frozen = options.pop("frozen", ())
    options.pop("length", None)
    torch.manual_seed(7)
    model = create_model(options.pop("preset"), **options).double()
    for parameter in model.parameters():  # as far from its start as to make all parts matter
        nn.init.normal_(parameter, std=0.3)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def run(
    out: Path,
    kind: str,
    *,
    optimizer: str = "adamw",
    lr: float = 0.01,
    steps: int = 3,
    accumulate: int = 1,
    resume: bool = False,
    final: str = "last",
    background: bool = False,
    mesh: dict[str, int] | None = None,
    **engine: Any,
) -> tuple[nn.Module, Result]:
    """Train the model of `kind` into `out` on a mesh; the run writes final.safetensors, but of "decoder"."""
    every = 2 if kind == "decoder" or final != "last" else steps  # of other runs none goes on
    config: Config = TrainingConfig(
        steps=steps,
        accumulate=accumulate,
        clip=0.5,
        saving=SavingConfig(checkpoint_every=every, keep=9, final=final, background=background),  # type: ignore[arg-type]
        reporting=ReportingConfig(log_every=1, evaluate_every=2),
    )
    for name, value in {"device": "cpu", "parallel": ParallelConfig(**(mesh or {})), **engine}.items():
        config = config.override(f"engine.{name}", value)
    assert isinstance(config, TrainingConfig)
    model = build(kind) if engine.get("precision") != "bf16" else build(kind).float()
    chosen = OptimizerConfig.from_dict({"kind": optimizer, "lr": lr})
    constant = ScheduleConfig.from_dict({"kind": "constant"})
    task = Texts(KINDS.get(kind, {}).get("length", LENGTH))
    if kind == "decoder":
        return model, train(model, task, config, chosen, constant, out, seed=3, resume=resume)
    training = Training(model, task, config, chosen, constant, out, 3, resume, None)
    return model, training.run({out / FINAL: model})


FIGURES = "loss", "grad_norm", "valid_loss"


def difference(first: Path, second: Path, figures: tuple[str, ...] = FIGURES) -> float:
    """The largest relative difference of two runs in losses and norms, and of their final weights."""
    tensors, theirs = (read_tensors(run / FINAL) for run in (first, second))
    assert tensors.keys() == theirs.keys()
    largest = metric_difference(first, second, figures)
    return max([largest, *(float((tensors[name] - theirs[name]).abs().max()) for name in tensors)])


def metric_difference(first: Path, second: Path, figures: tuple[str, ...] = FIGURES) -> float:
    """The same in losses and norms alone."""
    largest = 0.0
    rows, others = read_metrics(first), read_metrics(second)
    assert len(rows) == len(others) > 0
    for row, other in zip(rows, others):
        for name in figures:
            if name in row:
                largest = max(largest, abs(row[name] - other[name]) / max(abs(row[name]), 1e-3))
    return largest
