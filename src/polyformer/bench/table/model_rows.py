"""Public encoders with random weights, the same on both sides."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from polyformer.bench import families, models
from polyformer.bench.families import Batch, FamiliesBench
from polyformer.bench.models import ModelsBench
from polyformer.bench.table.row import OURS, Asked, Case, Make, Row

REVIEWS = 512, 310, 262, 214, 188, 166, 133, 102
"""Tokens of eight texts as reviews come, cut at 512: 46 % of the padded batch."""

SMALL_LONGFORMER = ModelsBench(
    length=40, layers=1, hidden_size=12, heads=3, vocab_size=30, window=4, block=2, random=2
)


def _bert(padded: bool) -> Callable[[bool], Iterator[Case]]:
    def cases(quick: bool) -> Iterator[Case]:
        lengths = REVIEWS if padded else (512, 512)
        ours, theirs = families.pair("bert-base", FamiliesBench(head="classify", layers=1 if quick else None))
        rows = [[length // 32 if quick else length for length in lengths]]
        batches = [_texts(row) for row in rows]
        passes: dict[str, Make] = {
            "transformers": lambda: families.forward(theirs, batches),
            OURS: lambda: families.forward(ours, batches),
        }
        yield Case(passes, tokens=sum(map(sum, rows)))

    return cases


def _texts(lengths: list[int]) -> Batch:
    """Random texts of these lengths, padded to the longest."""
    mask = torch.stack([(torch.arange(max(lengths)) < length).long() for length in lengths])
    ids = torch.randint(5, 1000, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    return {"input_ids": ids, "attention_mask": mask}


def _longformer(step: Any) -> Callable[[bool], Iterator[Case]]:
    def cases(quick: bool) -> Iterator[Case]:
        config = SMALL_LONGFORMER if quick else ModelsBench()
        ours, theirs, inputs = models.longformer(config)
        passes: dict[str, Make] = {
            "transformers": lambda: step(theirs, inputs),
            OURS: lambda: step(ours, inputs),
        }
        yield Case(passes, tokens=config.batch * config.length)

    return cases


ROWS = (
    Row(
        "bert-full",
        "BERT-base, forward, 2 full rows of 512 tokens",
        _bert(padded=False),
        (Asked("transformers", 0.95),),
    ),
    Row(
        "bert-padded",
        "BERT-base, forward, 8 padded texts of at most 512 tokens, 46 % of them real",
        _bert(padded=True),
        (Asked("transformers", 1.5),),
        repeats=3,
    ),
    Row(
        "longformer",
        "Longformer, 4 layers of 768, n = 4096, forward",
        _longformer(models.forward),
        (Asked("transformers", 1.1),),
        repeats=3,
    ),
    Row(
        "longformer-step",
        "Longformer, 4 layers of 768, n = 4096, forward and backward",
        _longformer(models.both),
        (Asked("transformers", 1.3),),
        repeats=3,
    ),
)
