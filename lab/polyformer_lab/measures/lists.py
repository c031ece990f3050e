"""Encoders that evaluate nested lists (ListOps): every closing bracket is labelled with its value."""

import random
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from polyformer.data.listops import PAD, VOCABULARY, Expression, ListOps
from polyformer.models.architectures import Transformer
from polyformer.nn.depth import recorded_depths
from polyformer.training import Batch
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.generated import HELD_OUT, Options, tagger, trained


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
