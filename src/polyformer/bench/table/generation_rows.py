"""Greedy generation of 64 tokens after 24, random weights, the same in all libraries."""

import functools
from collections.abc import Callable, Iterator

import torch

from polyformer.bench.generation import GenerationBench, pair
from polyformer.bench.generation_libraries import LIBRARIES
from polyformer.bench.table.row import OURS, Asked, Case, Make, Row

PROMPT, TOKENS = 24, 64
SLOW_TO_START = {"transformers-compiled"}
"""Compiles for minutes: no part of a quick run."""


def _cases(model: str, batch: int) -> Callable[[bool], Iterator[Case]]:
    def cases(quick: bool) -> Iterator[Case]:
        sides = pair(model, GenerationBench(layers=1 if quick else None))
        ids = torch.randint(5, 1000, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
        count = 2 if quick else TOKENS

        def make(library: str) -> Make:
            return lambda: functools.partial(LIBRARIES[library](sides), ids, count, 1)

        names = [name for name in LIBRARIES if not (quick and name in SLOW_TO_START)]
        yield Case({name: make(name) for name in names}, tokens=batch * count)

    return cases


def _asked(beside_transformers: float | None, batch: int) -> tuple[Asked, ...]:
    """In int8 more is asked for one text, when reading the weights is all the work."""
    return (
        Asked("transformers", beside_transformers),
        Asked("transformers-compiled"),
        Asked("ctranslate2", 1.0),
        Asked("llama.cpp"),
        Asked(OURS, 1.5 if batch == 1 else None, ours="polyformer-int8"),
        Asked("ctranslate2-int8", 1.0 if batch == 1 else None, ours="polyformer-int8"),
        Asked("llama.cpp-int8", ours="polyformer-int8"),
        Asked(OURS, ours="polyformer-bfloat16"),
    )


def _texts(batch: int) -> str:
    return "one text" if batch == 1 else f"{batch} texts"


ROWS = tuple(
    Row(
        f"{model}-greedy-{batch}",
        f"{name}, greedy, {_texts(batch)}, {TOKENS} tokens",
        _cases(model, batch),
        _asked(ratio, batch),
    )
    for model, name, batch, ratio in (
        ("gpt2", "GPT-2 124M", 1, 1.3),
        ("gpt2", "GPT-2 124M", 8, 2.0),
        ("t5-small", "T5-small", 1, None),
        ("t5-small", "T5-small", 8, 2.0),
    )
)
