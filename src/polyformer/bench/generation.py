"""Generation beside other libraries with the same weights: one text, a batch, and beams.

Random weights and prompts, no end token, so that every text has all its tokens: those of a decoder follow a
prompt, those of an encoder-decoder a source of as many tokens.
"""

import dataclasses
import functools
from typing import Any

import torch

from polyformer.architecture import ModelConfig
from polyformer.bench.benchmark_case import AbsentError
from polyformer.bench.generation_libraries import LIBRARIES, Pair, Write
from polyformer.bench.machine import begin
from polyformer.bench.timing import in_turn, median
from polyformer.checkpoints import FAMILIES, from_transformers
from polyformer.core.config import Config
from polyformer.core.errors import InputError, unknown
from polyformer.model import Transformer
from polyformer.presets import model_config

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
    "t5-small": ("t5", {}),
    "bart-base": ("bart", {}),
}
"""Models by name: their families, and what differs from a preset."""

PRESETS = {"gpt-j-small": "gpt-j-6b"}

OURS = "polyformer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationBench(Config):
    """Every model greedily for each batch size, and one text with beams."""

    models: tuple[str, ...] = tuple(MODELS)
    libraries: tuple[str, ...] = ("transformers", "polyformer")
    batches: tuple[int, ...] = (1, 8)  # texts at a time
    beams: tuple[int, ...] = (4,)  # of one text
    prompt: int = 24  # tokens
    new_tokens: int = 64
    layers: int | None = None  # of each stack; by default the model's
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None  # of a CPU; by default torch's own choice
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("prompt", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        for name in ("threads", "layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: expected 1 or more, got {value}")
        if self.batches and min(self.batches) < 1:
            raise InputError(f"batches: expected sizes of 1 or more, got {list(self.batches)}")
        if self.beams and min(self.beams) < 2:
            raise InputError(f"beams: expected 2 or more, got {list(self.beams)}")
        for name in self.models:
            if name not in MODELS:
                raise unknown("model", name, MODELS)
        for name in self.libraries:
            if name not in LIBRARIES:
                raise unknown("library", name, LIBRARIES)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One library writing with one model. `rate`: bytes of ours' weights a second, each once a token."""

    library: str
    model: str
    batch: int
    beams: int
    seconds: float
    tokens_per_second: float
    rate: float

    def __str__(self) -> str:
        how = f"{self.beams} beams" if self.beams > 1 else f"batch {self.batch}"
        return (
            f"{self.model:12} {how:9} {self.library:21} {self.seconds * 1e3:9.1f} ms "
            f"{self.tokens_per_second:8.1f} tokens/s {self.rate / 1e9:7.1f} GB/s of weights"
        )


def run(config: GenerationBench) -> list[Measured]:
    """The median time of every model, library and way to write; prints them with their ratios."""
    begin(config.threads)
    measured = []
    for name in config.models:
        sides = pair(name, config)
        writers = {}
        for library in config.libraries:
            try:
                writers[library] = LIBRARIES[library](sides)
            except (AbsentError, ImportError) as error:
                print(f"{library}: no comparison: {error}")
        sizes = [(batch, 1) for batch in config.batches] + [(1, beams) for beams in config.beams]
        for batch, beams in sizes:
            measured += _measure(name, sides, writers, batch, beams, config)
    return measured


def pair(name: str, config: GenerationBench) -> Pair:
    """Ours and, where transformers is installed, theirs with the same weights."""
    torch.manual_seed(0)
    family, shape = FAMILIES[MODELS[name][0]], _shape(name, config)

    def placed(model: Any) -> Any:
        return model.to(config.device, getattr(torch, config.dtype)).eval()

    try:
        import transformers
    except ImportError:
        return Pair(placed(Transformer(shape)))
    task = family.task({}, shape.head)
    shape = dataclasses.replace(shape, head=family.tasks[task].head)
    described, _ = family.hub_config(shape)
    theirs = getattr(transformers, family.class_prefix + task)(transformers.AutoConfig.for_model(**described))
    return Pair(placed(from_transformers(theirs)), placed(theirs))


def _shape(name: str, config: GenerationBench) -> ModelConfig:
    shape = model_config(PRESETS.get(name, name), MODELS[name][1])
    return shape if config.layers is None else shape.override("num_hidden_layers", config.layers)


def _measure(
    name: str, sides: Pair, writers: dict[str, Write], batch: int, beams: int, config: GenerationBench
) -> list[Measured]:
    """All libraries on the same prompts."""
    ids = torch.randint(5, 1000, (batch, config.prompt), device=config.device)
    runs = {key: functools.partial(write, ids, config.new_tokens, beams) for key, write in writers.items()}
    texts = {key: write() for key, write in runs.items()}
    weights = sum(parameter.numel() * parameter.element_size() for parameter in sides.ours.parameters())
    medians = {key: median(seconds) for key, seconds in in_turn(runs, config.repeats).items()}
    results = []
    for key, middle in medians.items():
        tokens = config.new_tokens / middle
        results.append(Measured(key, name, batch, beams, middle, batch * tokens, weights * tokens))
        print(results[-1])
    for key, middle in medians.items():
        if key != OURS and OURS in medians:
            same = "the same tokens" if torch.equal(texts[key], texts[OURS]) else "tokens that differ"
            ratio = middle / medians[OURS]
            print(f"{OURS} is {ratio:.2f} times as fast as {key}, with {same}", flush=True)
    return results
