"""A row of the table of members: its questions, one training run with a seed, and the cost of a step.

A row is a passage of a book in the letters a to z and spaces, n characters. In its first quarter four
characters have a name (a token type). In its second half characters are hidden, and each hidden character is
a question: the type of a name requires the character of that name, at least n / 4 characters before
(*recall*); the type `BACK` requires the character `DISTANCE` before it (*back*). Answers are never shown, so
that a repeated question reveals nothing. A tenth of all other places are questions about the text itself: a
decoder predicts the next character, an encoder a hidden character (*text*).

Rows that need two dimensions read images: 14 x 14 pixels in eight levels, a token each.

A trial is evaluated by its answers on held-out text. The cost of a step is how its time grows with the length
of a row, and its peak memory.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.measuring import time_once
from polyformer.data.formats.images import IMAGE, read_idx
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model
from polyformer_lab.costs import peak_mib
from polyformer_lab.members.listing import Row

LETTERS = " abcdefghijklmnopqrstuvwxyz"
HIDDEN = len(LETTERS)
VOCABULARY = HIDDEN + 1

NAMES, REPEATED = 4, 1 / 32
"""The number of names in a row, and the questions about each name, as a share of the row's length."""

BACK, DISTANCE = NAMES + 1, 4
TYPES = BACK + 1

ELSEWHERE = 0.1
"""The share of the other places that are questions about the text."""

KINDS = "recall", "back", "text"
Side = Literal["decoder", "encoder"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of questions.

    inputs: inputs of a model except labels, by argument, [B, T] each.
    answers: the right token at every question [B, T], -100 elsewhere.
    kind: an index into `kinds` at every question [B, T].
    """

    inputs: dict[str, Tensor]
    answers: Tensor
    kind: Tensor
    kinds: tuple[str, ...] = KINDS


@functools.cache
def letters(file: str, count: int) -> Tensor:
    """Return the first letters of the first document in a file written by a preparation."""
    with open(file, encoding="utf-8") as lines:
        text = json.loads(lines.readline())["text"]
    own = re.sub("[^a-z]+", " ", text.lower())[:count]
    return torch.tensor([LETTERS.index(letter) for letter in own])


def questions(text: Tensor, rows: int, length: int, side: Side, generator: torch.Generator) -> Rows:
    """Return rows drawn from `text` [N], of more than `length` + `DISTANCE` characters."""
    start = torch.randint(len(text) - length - DISTANCE, (rows, 1), generator=generator)
    passage = text[start + torch.arange(length + DISTANCE + 1)]
    ids, following, earlier = (passage[:, shift : shift + length] for shift in (DISTANCE, DISTANCE + 1, 0))
    types, kind = torch.zeros_like(ids), torch.full_like(ids, KINDS.index("text"))
    answers = torch.full_like(ids, -100)

    named = _places(rows, length // 4, generator)[:, :NAMES]
    types.scatter_(1, named, torch.arange(1, NAMES + 1).expand(rows, NAMES))
    asked = torch.arange(NAMES).repeat(max(1, int(length * REPEATED)))
    places = _places(rows, length - length // 2, generator)[:, : len(asked) + len(asked) // 2] + length // 2
    recall, back = places.split([len(asked), len(asked) // 2], 1)
    types.scatter_(1, recall, (asked + 1).expand(rows, -1)).scatter_(1, back, BACK)
    answers.scatter_(1, recall, ids.gather(1, named[:, asked]))
    answers.scatter_(1, back, earlier.gather(1, back))
    kind.scatter_(1, recall, KINDS.index("recall")).scatter_(1, back, KINDS.index("back"))

    others = (types == 0) & (torch.rand(types.shape, generator=generator) < ELSEWHERE)
    answers = torch.where(others, following if side == "decoder" else ids, answers)
    hidden = torch.zeros_like(others).scatter_(1, places, True)
    hidden = hidden | others if side == "encoder" else hidden
    source = torch.cat([torch.zeros_like(hidden[:, :DISTANCE]), hidden[:, :-DISTANCE]], 1)
    answers = answers.masked_fill((types == BACK) & source, -100)  # its character is hidden too
    inputs = {"input_ids": ids.masked_fill(hidden, HIDDEN), "token_type_ids": types}
    return Rows(inputs, answers, kind)


def named_places(rows: Rows) -> Tensor:
    """Return 1 for each character that has a name, [B, T]."""
    length = rows.answers.shape[1]
    first = torch.arange(length) < length // 4
    return ((rows.inputs["token_type_ids"] > 0) & first).long()


def _places(rows: int, among: int, generator: torch.Generator) -> Tensor:
    """Return a random order of the first `among` places for each row."""
    return torch.rand(rows, among, generator=generator).argsort(-1)


LEVELS, SIDE, SHRUNK = 8, 14, 2
PICTURE = ("pixel",)


def pixels(file: str, images: int) -> Tensor:
    """Return the first images of an IDX file of 28 x 28 pixels, [N, 196]: means of 2 x 2 pixels as levels."""
    rows = list(itertools.islice(read_idx(Path(file)), images))
    size = SIDE * SHRUNK
    if any((row["height"], row["width"]) != (size, size) for row in rows):
        raise InputError(f"images: expected images of {size} x {size} pixels in {file}, such as MNIST's")
    whole = torch.stack([torch.frombuffer(bytearray(row[IMAGE]), dtype=torch.uint8) for row in rows])
    small = whole.view(-1, SIDE, SHRUNK, SIDE, SHRUNK).float().mean((2, 4))
    return (small * LEVELS / 256).long().flatten(1)


def as_rows(ids: Tensor) -> Rows:
    """Return rows in which the answer of every pixel [B, T] is the next pixel."""
    ahead = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    return Rows({"input_ids": ids}, ahead, torch.zeros_like(ids), PICTURE)


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
        "embedding": {"type_vocab_size": 0 if row.table == "image" else TYPES},
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
        inputs["global_attention_mask"] = named_places(rows)
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


LENGTHS = 512, 2048
"""The lengths of the row from whose times the slope is computed; an image has the next smaller square."""

MEMORY_LENGTH, WARM_LENGTH = 1024, 64
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Step:
    """Forward and backward of a row's model, for a text or image of `length` tokens."""

    row: Row
    budget: Budget
    length: int


def step(case: Step) -> Callable[[], None]:
    """Return the call with its model and its tokens."""
    generator = torch.Generator().manual_seed(0)
    image = case.row.table == "image"
    length = math.isqrt(case.length) ** 2 if image else case.length
    vocabulary = LEVELS if image else VOCABULARY
    trained = model(case.row, case.budget, length, vocabulary).train()
    batch = _random(case.row, length, generator)

    def call() -> None:
        trained.zero_grad(set_to_none=True)
        backward(trained, case.row, batch)

    return call


def slope(row: Row, budget: Budget) -> float:
    """Return the exponent of n in the time of forward and backward, between the two `LENGTHS`."""
    seconds = []
    for length in LENGTHS:
        call = step(Step(row, budget, length))
        call()
        seconds.append(min(time_once(call) for _ in range(REPEATS)))
    return math.log(seconds[1] / seconds[0]) / math.log(LENGTHS[1] / LENGTHS[0])


def mebibytes(row: Row, budget: Budget) -> float:
    """Return the peak memory of forward and backward for a row of `MEMORY_LENGTH` tokens."""
    case, warm = (Step(row, budget, length) for length in (MEMORY_LENGTH, WARM_LENGTH))
    return peak_mib(step, case, warm, "cpu")


def _random(row: Row, length: int, generator: torch.Generator) -> Rows:
    if row.table == "image":
        return as_rows(torch.randint(LEVELS, (1, length), generator=generator))
    text = torch.randint(HIDDEN, (2 * length,), generator=generator)
    return questions(text, 1, length, row.table, generator)
