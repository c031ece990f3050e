"""One training run: a row of the table with one seed, evaluated by its answers on held-out text."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model
from polyformer_lab.members import questions
from polyformer_lab.members.listing import Row
from polyformer_lab.members.questions import Rows

RELATIONS = 33
"""Labels of pairs of tokens: their distance, limited to 16 in both directions."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Sizes and training of every row.

    rows: in a step. length: tokens of a row. held_out: rows to score.
    """

    steps: int
    rows: int
    length: int
    layers: int
    width: int
    heads: int
    lr: float
    warmup: int
    held_out: int


@dataclasses.dataclass(frozen=True)
class Score:
    """Nats of held-out questions by kind, the share of right answers, and the median time of a step."""

    nats: Mapping[str, float]
    right: Mapping[str, float]
    milliseconds: float


def model(row: Row, budget: Budget, length: int, vocabulary: int) -> Transformer:
    """Return the row's model for rows of `length` tokens.

    Raises:
        InputError: the member cannot be used there.
    """
    preset, head = (
        ("encoder-tiny", f"tag(num_labels={vocabulary}, dropout=0.0)")
        if row.table == "encoder"
        else ("decoder-tiny", "language_model")
    )
    options: dict[str, Any] = {
        "num_hidden_layers": budget.layers,
        "hidden_size": budget.width,
        "num_attention_heads": budget.heads,
        "intermediate_size": 4 * budget.width,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "dropout": 0.0,
        "initializer_range": None,
        "embedding": {"type_vocab_size": 0 if row.table == "image" else questions.TYPES},
        "head": head,
        **row.options(length),
    }
    built = create_model(preset, **options)
    assert isinstance(built, Transformer)
    return built


def refusal(row: Row, budget: Budget, rows: Rows, vocabulary: int) -> str | None:
    """Return the reason why the member cannot be used in the row's table; None if it can."""
    try:
        with torch.no_grad():
            logits_of(model(row, budget, budget.length, vocabulary), row, rows)
    except InputError as error:
        return str(error)
    return None


def train(row: Row, budget: Budget, batches: list[Rows], held_out: Rows, vocabulary: int, seed: int) -> Score:
    """Return the score after one step per batch of `batches`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trained = model(row, budget, budget.length, vocabulary).train()
        optimizer = torch.optim.AdamW(
            trained.parameters(), lr=budget.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        rate = functools.partial(_rate, warmup=budget.warmup, steps=len(batches))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        seconds = []
        for batch in batches:
            start = time.perf_counter()
            optimizer.zero_grad()
            backward(trained, row, batch)
            optimizer.step()
            schedule.step()
            seconds.append(time.perf_counter() - start)
        nats, right = _measured(trained.eval(), row, held_out, budget.rows)
    return Score(nats, right, 1e3 * statistics.median(seconds))


def _rate(step: int, warmup: int, steps: int) -> float:
    """Return a rate that rises for `warmup` steps, is level for half of the training, then falls to 0."""
    return min(1.0, (step + 1) / warmup, 2 * (1 - step / steps))


def backward(trained: Transformer, row: Row, batch: Rows) -> None:
    """Add the gradient of the mean loss over the batch's questions, and of the model's auxiliary losses."""
    total, state = (batch.answers != -100).sum(), None
    for part in _segments(batch, row.segments):
        share = (part.answers != -100).sum() / total
        # A segment without questions is also read, since it changes the memory.
        labels = {_labels(row): part.answers} if share else {}
        output = trained(**_inputs(part, row), **labels, state=state, use_cache=row.supports_recurrence)
        state = output.state.detach() if row.supports_recurrence else None
        if share:
            (output.loss * share).backward()


def _labels(row: Row) -> str:
    return "labels" if row.table == "encoder" else "shift_labels"


def _inputs(rows: Rows, row: Row) -> dict[str, Tensor]:
    """Return the inputs with the extra inputs of individual members: marks, labels of pairs."""
    inputs = dict(rows.inputs)
    if "Marked" in row.expression:
        inputs["global_attention_mask"] = questions.named_places(rows)
    if row.expression.startswith("relation"):
        place = torch.arange(rows.answers.shape[1])
        half = RELATIONS // 2
        distance = (place - place[:, None]).clamp(-half, half) + half
        inputs["relation_ids"] = distance.expand(len(rows.answers), -1, -1)
    return inputs


def _segments(rows: Rows, count: int) -> Iterator[Rows]:
    """Yield the rows in `count` segments, in order."""
    size = -(-rows.answers.shape[1] // count)
    pieces = {name: tensor.split(size, 1) for name, tensor in rows.inputs.items()}
    for i, (answers, kind) in enumerate(
        zip(rows.answers.split(size, 1), rows.kind.split(size, 1), strict=True)
    ):
        yield Rows({name: tensors[i] for name, tensors in pieces.items()}, answers, kind)


def logits_of(trained: Transformer, row: Row, rows: Rows) -> Tensor:
    """Return logits [B, T, V], computed in the row's segments."""
    logits, state = [], None
    for part in _segments(rows, row.segments):
        output = trained(**_inputs(part, row), state=state, use_cache=row.supports_recurrence)
        state = output.state if row.supports_recurrence else None
        logits.append(output.logits)
    return torch.cat(logits, 1)


@torch.no_grad()
def _measured(
    trained: Transformer, row: Row, held_out: Rows, at_once: int
) -> tuple[dict[str, float], dict[str, float]]:
    nats, right = [], []
    for start in range(0, len(held_out.answers), at_once):
        chosen = slice(start, start + at_once)
        inputs = {name: tensor[chosen] for name, tensor in held_out.inputs.items()}
        answers = held_out.answers[chosen]
        logits = logits_of(trained, row, Rows(inputs, answers, held_out.kind[chosen]))
        nats.append(F.cross_entropy(logits.mT, answers, reduction="none", ignore_index=-100))
        right.append(logits.argmax(-1) == answers)
    losses, hits = torch.cat(nats), torch.cat(right)
    asked = {name: (held_out.kind == i) & (held_out.answers != -100) for i, name in enumerate(held_out.kinds)}
    return (
        {name: float(losses[places].mean()) for name, places in asked.items()},
        {name: float(hits[places].float().mean()) for name, places in asked.items()},
    )
