"""Training on batches that a function makes from a number, and three tasks of it.

associations    decoders recall values of keys: tokens with a key and a value each, then every key again
parities        decoders say after every bit of a string whether the number of ones so far is odd
lists           encoders evaluate nested lists (ListOps): every closing bracket is labelled with its value
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.files import read_json, write_json
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model
from polyformer.nn.depth import recorded_depths
from polyformer.training import (
    Batch,
    OptimizerConfig,
    ReportingConfig,
    SavingConfig,
    ScheduleConfig,
    TrainingConfig,
    share,
    train,
)
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.listops import PAD, VOCABULARY, Expression, ListOps

Model = TypeVar("Model", bound=nn.Module)
Make = Callable[[torch.Generator], Batch]
Options = Mapping[str, Any]

HELD_OUT = (1 << 62) + 1
"""The seed of test batches; the seeds of training are smaller."""


def created(model: Options, **more: Any) -> Any:
    """Return the `preset` of a study with its options and `more`, with fresh weights."""
    options = dict(model)
    return create_model(options.pop("preset"), **{**options, **more})


def tagger(model: Options, vocab_size: int, num_labels: int) -> Any:
    """Return an encoder with fresh weights that names a label at every token."""
    head = {"kind": "tag", "num_labels": num_labels, "dropout": 0.0}
    return created(model, vocab_size=vocab_size, head=head)


class Generated:
    """An endless data set: batch n is the result of `make` for a generator that is seeded by `seed` and n."""

    best = "loss"
    direction: Literal["min", "max"] = "min"

    def __init__(self, make: Make, seed: int):
        self.make, self.seed = make, seed

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        """Yield all batches in one epoch."""
        for number in share(range(1 << 40), skip, rank, world):
            yield self.make(torch.Generator().manual_seed((self.seed << 40) + number))

    def weight(self, batch: Batch) -> int:
        """Return the number of labelled tokens."""
        labels = batch["labels"] if "labels" in batch else batch["shift_labels"]
        return int((labels != -100).sum())

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of the model."""
        return model(**batch).loss

    def evaluate(self, model: nn.Module, accelerator: Any) -> dict[str, float]:
        """Return no scores: the measurement follows."""
        return {}


def trained(cell: Cell, create: Callable[[], Model], make: Make, steps: int, lr: float) -> Model:
    """Return a model trained by Adam with a warm-up and a cosine, or resume the run in the cell's folder.

    Raises:
        InputError: the folder holds a run of other settings.
    """
    settings, place = cell.folder / "settings.json", cell.folder
    begun = settings.is_file()
    if begun and read_json(settings, dict) != cell.settings:
        raise InputError(f"{place} holds a run of other settings; choose another place with --out")
    place.mkdir(parents=True, exist_ok=True)
    write_json(settings, cell.settings)
    torch.manual_seed(cell.seed or 0)
    model = create()
    config = TrainingConfig(
        steps=steps,
        saving=SavingConfig(checkpoint_every=500),
        reporting=ReportingConfig(log_every=50, evaluate_every=steps),
    )
    optimizer = OptimizerConfig.from_dict({"kind": "adam", "lr": lr})
    schedule = ScheduleConfig.from_dict({"kind": "cosine", "warmup": min(200, steps)})
    task = Generated(make, cell.seed or 0)
    train(model, task, config, optimizer, schedule, place, seed=task.seed, resume=begun)
    return model.eval()


ASKED = 0
"""The type of a key without a value; the value v has the type v + 1."""


@measurement("pairs")
def associations(
    cell: Cell,
    model: Options,
    keys: int,
    values: int,
    length: int,
    lengths: Sequence[int],
    rows: int,
    tested: int,
    steps: int,
    lr: float,
    writes: int = 1,
) -> Iterator[Row]:
    """Yield for each number of pairs the share of keys with the right value.

    Args:
        cell: the cell; its folder gets the training.
        model: a preset and its options.
        keys, values: how many there are.
        length: the greatest number of pairs in training.
        lengths: numbers of pairs in the tests, the same rows for every model.
        rows: rows in a batch.
        tested: test rows of each number of pairs.
        steps: training steps.
        lr: the highest learning rate.
        writes: how often each key gets a value; the last value is right.
    """

    def drawn(generator: torch.Generator) -> Batch:
        pairs = int(torch.randint(1, length + 1, (), generator=generator))
        return rows_of_pairs(rows, pairs, keys, values, generator, writes)

    vocabulary = {"vocab_size": max(keys, values), "type_vocab_size": values + 1}
    labeller = trained(cell, lambda: created(model, **vocabulary), drawn, steps, lr)
    for pairs in lengths:
        generator = torch.Generator().manual_seed(pairs)
        batch = rows_of_pairs(tested, pairs, keys, values, generator, writes)
        with torch.no_grad():
            right = labeller(**batch).logits.argmax(-1) == batch["shift_labels"]
        yield {"pairs": pairs, "right": float(right[:, -pairs:].float().mean())}


def rows_of_pairs(
    rows: int, pairs: int, keys: int, values: int, generator: torch.Generator, writes: int
) -> Batch:
    """Return rows of keys with values as types, `writes` times in random order, then of the same keys."""
    order = torch.rand(rows, keys, generator=generator).argsort(1)[:, :pairs]
    position = torch.rand(rows, pairs * writes, generator=generator).argsort(1) % pairs
    value = torch.randint(values, position.shape, generator=generator)
    asked = torch.rand(rows, pairs, generator=generator).argsort(1)
    latest = torch.zeros_like(order)
    for index in range(pairs * writes):
        latest.scatter_(1, position[:, index : index + 1], value[:, index : index + 1])
    types = torch.cat([value + 1, torch.full_like(asked, ASKED)], 1)
    labels = torch.cat([torch.full_like(value, -100), latest.gather(1, asked)], 1)
    return {
        "input_ids": torch.cat([order.gather(1, position), order.gather(1, asked)], 1),
        "token_type_ids": types,
        "shift_labels": labels,
    }


@measurement("bits")
def parities(
    cell: Cell,
    model: Options,
    length: int,
    lengths: Sequence[int],
    rows: int,
    tested: int,
    steps: int,
    lr: float,
) -> Iterator[Row]:
    """Yield for each length the share of test strings with the right parity after the last bit.

    Args:
        cell: the cell; its folder gets the training.
        model: a preset and its options.
        length: bits of the longest string in training.
        lengths: bits of the test strings, the same strings for every model.
        rows: strings in a batch.
        tested: test strings of each length.
        steps: training steps.
        lr: the highest learning rate.
    """

    def drawn(generator: torch.Generator) -> Batch:
        return strings_of_bits(rows, int(torch.randint(1, length + 1, (), generator=generator)), generator)

    labeller = trained(cell, lambda: created(model, vocab_size=2), drawn, steps, lr)
    for bits in lengths:
        batch = strings_of_bits(tested, bits, torch.Generator().manual_seed(bits))
        with torch.no_grad():
            right = labeller(**batch).logits.argmax(-1) == batch["shift_labels"]
        yield {"bits": bits, "right": float(right[:, -1].float().mean())}


def strings_of_bits(rows: int, length: int, generator: torch.Generator) -> Batch:
    """Return random bits [rows, length] and the parity of each prefix."""
    bits = torch.randint(0, 2, (rows, length), generator=generator)
    return {"input_ids": bits, "shift_labels": bits.cumsum(1) % 2}


@measurement()
def listops(cell: Cell, model: Options, lists: Options, rows: int, tested: int, steps: int, lr: float) -> Row:
    """Return the share of lists with the right value, and the share of the most frequent value.

    The value of a list is predicted at its outermost bracket.

    Args:
        cell: the cell; its folder gets the training.
        model: a preset and its options.
        lists: the arguments of `drawn`.
        rows: lists in a batch.
        tested: the number of test lists.
        steps: training steps.
        lr: the highest learning rate.
    """
    evaluator = _evaluator(cell, model, lists, rows, steps, lr)
    batch, _ = drawn(tested, torch.Generator().manual_seed(HELD_OUT), **lists)
    values, right = outermost(batch["labels"], batch), 0
    for start in range(0, tested, 100):
        part = {name: own[start : start + 100] for name, own in batch.items()}
        with torch.no_grad():
            predicted = evaluator(**part).logits.argmax(-1)
        right += int((outermost(predicted, part) == values[start : start + 100]).sum())
    frequent = Counter(values.tolist()).most_common(1)[0][1]
    return {"accuracy": right / tested, "most_frequent": frequent / tested}


@measurement("depth")
def ponder(
    cell: Cell, model: Options, lists: Options, rows: int, tested: int, steps: int, lr: float
) -> Iterator[Row]:
    """Yield by depth of a list the mean halting step of its outermost bracket and the share of right values.

    The arguments are the same as in `listops`, but `tested` counts lists of each depth.
    """
    evaluator = _evaluator(cell, model, lists, rows, steps, lr)
    for depth in range(1, lists["depth"] + 1):
        batch, depths = drawn(tested, torch.Generator().manual_seed(depth), **lists, exactly=depth)
        with recorded_depths() as halted, torch.no_grad():
            right = evaluator(**batch).logits.argmax(-1) == batch["labels"]
        last = depths == depth
        steps_taken, share = (float(each[last].float().mean()) for each in (halted[0], right))
        yield {"depth": depth, "steps": steps_taken, "right": share}


def _evaluator(cell: Cell, model: Options, lists: Options, rows: int, steps: int, lr: float) -> Transformer:
    """Return a trained encoder that names the value of every bracket."""

    def batch(generator: torch.Generator) -> Batch:
        return drawn(rows, generator, **lists)[0]

    return trained(cell, lambda: tagger(model, VOCABULARY, 10), batch, steps, lr)


def drawn(
    rows: int,
    generator: torch.Generator,
    *,
    depth: int,
    items: int,
    nested: float,
    longest: int | None = None,
    exactly: int | None = None,
) -> tuple[Batch, Tensor]:
    """Return lists of MIN and MAX, and the depths [B, T] of the lists that their brackets close.

    No list contains a list of the same operator, so that evaluating a list requires the values of its inner
    lists.

    Args:
        rows: lists in the batch.
        generator: the source of random numbers.
        depth: the depth of the deepest lists.
        items: the most items of a list.
        nested: the chance that an item is a list too, if there is already a list of the required depth.
        longest: the most tokens; a list that is longer, or less than half this length, is drawn again.
        exactly: the depth of all lists.
    """
    draw = random.Random(int(torch.randint(1 << 40, (), generator=generator)))
    rules, texts = ListOps(("MIN", "MAX"), items, nested), list[Expression]()
    while len(texts) < rows:
        text = rules.expression(exactly or draw.randint(1, depth), draw)
        if longest is None or longest // 2 <= len(text.ids) <= longest:
            texts.append(text)
    width = max(len(text.ids) for text in texts)

    def padded(numbers: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([row + [filler] * (width - len(row)) for row in numbers])

    ids = padded([text.ids for text in texts], PAD)
    labels = padded([text.values for text in texts], -100)
    batch = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}
    return batch, padded([text.depths for text in texts], 0)


def outermost(values: Tensor, batch: Batch) -> Tensor:
    """Return the value [B] of each list's last bracket from values [B, T]."""
    return values[torch.arange(len(values)), batch["attention_mask"].sum(1) - 1]
