"""Generation compared with other libraries with the same weights: one text, a batch, and beam search.

Weights and prompts are random and there is no end token, so that every text has all its tokens: tokens of a
decoder follow a prompt, tokens of an encoder-decoder a source of the same length.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.checkpoints import FAMILIES
from polyformer.models.presets import model_config
from polyformer_lab.bench.generation_libraries import (
    COMPILED,
    LIBRARIES,
    WINDOWED,
    Write,
    quantized_weights,
)
from polyformer_lab.bench.passes import Pair
from polyformer_lab.bench.rows import OURS, Case, DeviceBench, Make, Row, check_names
from polyformer_lab.bench.running import runner

SMALL_GPTJ = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "fraction": 0.5,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt-j-small": ("gptj", SMALL_GPTJ),
    "smollm2-135m": ("llama", {}),
    "t5-small": ("t5", {}),
    "bart-base": ("bart", {}),
}
"""Models by name: their families, and the differences from a preset."""

PRESETS = {"gpt-j-small": "gpt-j-6b"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationBench(DeviceBench):
    """Greedy generation by every model for each batch size, and of one text with beams."""

    models: tuple[str, ...] = ("gpt2", "gpt-j-small", "t5-small", "bart-base")
    libraries: tuple[str, ...] = ("transformers", "polyformer")
    batches: tuple[int, ...] = (1, 8)  # texts per batch
    beams: tuple[int, ...] = (4,)  # of one text
    prompt: int = 24  # tokens
    new_tokens: int = 64
    layers: int | None = None  # of each stack; by default the model's
    repeats: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beams and min(self.beams) < 2:
            raise InputError(f"beams: expected 2 or more, got {list(self.beams)}")
        check_names("model", self.models, MODELS)
        check_names("library", self.libraries, LIBRARIES)

    def rows(self) -> Iterator[Row]:
        """Yield a row for each model, with a case for each way to generate."""
        ours = [name for name in self.libraries if name.startswith(OURS)]
        peers = [name for name in self.libraries if name not in ours]
        plain = {peer: f"{OURS}-{quantized_weights(peer)}" for peer in peers}
        pairs = [(plain[peer] if plain[peer] in ours else OURS, peer) for peer in peers]
        pairs += [(name, OURS) for name in ours if name != OURS]
        for name in ours:
            if name.startswith((COMPILED, WINDOWED)):
                same = quantized_weights(name)
                pairs += [(name, peer) for peer in peers if quantized_weights(peer) == same]
        for name in self.models:
            what = f"{name}, {self.new_tokens} tokens after {self.prompt}"
            yield Row(name, what, functools.partial(self._cases, name), pairs, repeats=self.repeats)

    def _cases(self, name: str) -> Iterator[Case]:
        sides = pair(name, self)
        writer = functools.cache(lambda library: LIBRARIES[library](sides))
        weights = sum(parameter.numel() * parameter.element_size() for parameter in sides.ours.parameters())
        ways = {f"{batch} texts" if batch > 1 else "one text": (batch, 1) for batch in self.batches}
        ways |= {f"one text, {beams} beams": (1, beams) for beams in self.beams}
        for way, (batch, beams) in ways.items():
            ids = torch.randint(5, 1000, (batch, self.prompt), device=self.device)
            yield Case(
                {library: self._make(writer, library, ids, beams) for library in self.libraries},
                way,
                work={"tokens": batch * self.new_tokens, "GB of weights": weights * self.new_tokens / 1e9},
            )

    def _make(self, writer: Callable[[str], Write], library: str, ids: Tensor, beams: int) -> Make:
        return lambda: functools.partial(writer(library), ids, self.new_tokens, beams)


def pair(name: str, config: GenerationBench) -> Pair:
    """Return the model with random weights."""
    kind, changes = MODELS[name]
    shape = model_config(PRESETS.get(name, name), changes)
    if config.layers is not None:
        shape = shape.override("num_hidden_layers", config.layers)
    both = Pair.of(FAMILIES[kind], shape, **config.place)
    return Pair(*(model and model.eval() for model in (both.ours, both.theirs)))


run = runner(GenerationBench)
