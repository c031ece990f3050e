"""Texts that a model generates for its calibration, with layers per token, and their similarity."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from polyformer.data.formats.questions_and_summaries import RougeTokenizer, scorer
from polyformer.models.architectures import Transformer
from polyformer.models.generation import ContinuedText, Decode, GenerationConfig
from polyformer.nn.depth import full_depth, recorded_depths
from polyformer.nn.depth.exits import set_threshold

ROWS = 16  # prompts per batch

Write = Callable[[Transformer], list[str]]
"""A function that generates texts with a model, in a fixed order."""


@dataclasses.dataclass(frozen=True)
class GeneratedTexts:
    """Generated texts, one per prompt or source."""

    texts: list[str]
    layers: float  # mean number of decoder layers per generated token
    seconds: float  # total time


def generate_texts(
    model: Transformer, write: Write, threshold: float | Sequence[float] | None
) -> GeneratedTexts:
    """Generate with exits at `threshold` (a number, or a number per exit), or without exits if it is None."""
    set_threshold(model, 1.0 if threshold is None else threshold)
    start = time.perf_counter()
    with full_depth(threshold is None), recorded_depths() as depths:
        texts = write(model)
    seconds = time.perf_counter() - start
    steps = [depth for depth in depths if depth.shape[1] == 1]  # longer steps read a prompt
    layers = torch.cat([depth.flatten() for depth in steps]).double().mean() if steps else torch.tensor(0.0)
    return GeneratedTexts(texts, float(layers), seconds)


def continuation_generator(
    rows: Sequence[Sequence[int]], prompt: int, decode: Decode
) -> tuple[Write, list[str]]:
    """Return a function that continues the first `prompt` tokens of each row, and the true continuations."""
    settings = GenerationConfig(max_new_tokens=len(rows[0]) - prompt)

    def write(model: Transformer) -> list[str]:
        device, texts = next(model.parameters()).device, list[str]()
        for start in range(0, len(rows), ROWS):
            ids = torch.tensor([row[:prompt] for row in rows[start : start + ROWS]], device=device)
            texts += model.generate(ids, None, settings).texts(decode)
        return texts

    return write, [ContinuedText(decode, row[:prompt])(row[prompt:]) for row in rows]


class Translator(Protocol):
    """A task or a checkpoint that translates."""

    def translate(self, model: Transformer, texts: Sequence[str]) -> list[str]:
        """Return the translation of each text."""
        ...


def translation_generator(translator: Translator, sources: Sequence[str]) -> Write:
    """Return a function that translates all `sources`."""
    return lambda model: translator.translate(model, sources)


class RougeL:
    """ROUGE-L of two texts: F1 of their longest common subsequence of words (Lin 2004)."""

    def __init__(self) -> None:
        self.scorer = scorer("rougeL")

    def __call__(self, target: str, text: str) -> float:
        """Return ROUGE-L from 0 to 1; 1 if neither text has a word."""
        if not RougeTokenizer().tokenize(target) and not RougeTokenizer().tokenize(text):
            return 1.0
        return self.scorer.score(target, text)["rougeL"].fmeasure
