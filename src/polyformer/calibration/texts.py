"""What a model writes for the texts that it is calibrated with, and how many layers its tokens take."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from polyformer.depth import recorded_depths, whole_depth
from polyformer.depth.exits import set_threshold
from polyformer.generation import GenerationConfig
from polyformer.generation.stopping import Decode
from polyformer.model import Transformer

ROWS = 16
"""Prompts that are continued at once."""

Write = Callable[[Transformer], list[str]]
"""Texts that a model writes, in a fixed order."""


@dataclasses.dataclass(frozen=True)
class Written:
    """texts: one for each prompt or source. layers: mean number of the decoder's layers that a written token
    went through. seconds: of everything."""

    texts: list[str]
    layers: float
    seconds: float


def written(model: Transformer, write: Write, threshold: float | Sequence[float] | None) -> Written:
    """With exits at `threshold`, or one for each exit, or without where it is None."""
    set_threshold(model, 1.0 if threshold is None else threshold)
    start = time.perf_counter()
    with whole_depth(threshold is None), recorded_depths() as depths:
        texts = write(model)
    seconds = time.perf_counter() - start
    steps = [depth for depth in depths if depth.shape[1] == 1]  # others read a prompt
    layers = torch.cat([depth.flatten() for depth in steps]).double().mean() if steps else torch.tensor(0.0)
    return Written(texts, float(layers), seconds)


def continuing(rows: Sequence[Sequence[int]], prompt: int, decode: Decode) -> tuple[Write, list[str]]:
    """What continues the first `prompt` tokens of each row, as far as the row goes, and what really did."""
    settings = GenerationConfig(max_new_tokens=len(rows[0]) - prompt)

    def write(model: Transformer) -> list[str]:
        device, texts = next(model.parameters()).device, list[str]()
        for start in range(0, len(rows), ROWS):
            ids = torch.tensor([row[:prompt] for row in rows[start : start + ROWS]], device=device)
            texts += model.generate(ids, None, settings).texts(decode)
        return texts

    return write, [decode(row[prompt:]) for row in rows]


class Translator(Protocol):
    """What translates: a task, or a checkpoint."""

    def translate(self, model: Transformer, texts: Sequence[str]) -> list[str]:
        """The translation of each text."""
        ...


def translating(translator: Translator, sources: Sequence[str]) -> Write:
    """What translates all `sources`."""
    return lambda model: translator.translate(model, sources)
