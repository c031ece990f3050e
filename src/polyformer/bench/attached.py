"""A model of transformers as it is, beside itself with a pattern attached: random BERT, on a long text."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyformer.bench.machine import begin
from polyformer.bench.timing import in_turn, median
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.inside.attach import attach
from polyformer.patterns.base import Pattern


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachedBench(Config):
    """BERT of transformers, without dropout; forward alone and with backward."""

    pattern: Pattern = Pattern.from_text("Window(64)")
    batch: int = 1
    length: int = 4096
    layers: int = 4  # with hidden_size and heads: the sizes of BERT-Mini
    hidden_size: int = 256
    heads: int = 4
    vocab_size: int = 1000
    device: str = "cpu"
    threads: int | None = None  # of a CPU; by default torch's own choice
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("batch", "length", "layers", "heads", "vocab_size", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")


def run(config: AttachedBench) -> dict[str, float]:
    """Median seconds by "pass implementation"; prints them, and their ratios to sdpa."""
    begin(config.threads)
    try:
        import transformers
    except ImportError:
        raise InputError("transformers is not installed (pip install 'polyformer[hub]')") from None
    torch.manual_seed(0)
    settings = transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=config.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    plain: Any = transformers.BertModel(settings, add_pooling_layer=False)
    plain = plain.to(config.device)
    text = config.pattern.to_text()
    models = {"sdpa": plain, text: attach(copy.deepcopy(plain), config.pattern)}
    ids = torch.randint(config.vocab_size, (config.batch, config.length), device=config.device)
    print(
        f"{config.layers} layers of {config.hidden_size}, {config.batch} x {config.length} tokens, "
        f"{config.device}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    results: dict[str, float] = {}
    for name, call in (("forward", _forward), ("forward + backward", _both)):
        seconds = in_turn({label: call(model, ids) for label, model in models.items()}, config.repeats)
        medians = {label: median(times) for label, times in seconds.items()}
        for label, middle in medians.items():
            results[f"{name} {label}"] = middle
            print(f"{name:20} {label:40} {middle:8.3f} s   {medians['sdpa'] / middle:5.2f} x sdpa")
    return results


def _forward(model: Any, ids: Tensor) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            model(ids)

    return call


def _both(model: Any, ids: Tensor) -> Callable[[], object]:
    def call() -> None:
        model(ids)[0].square().mean().backward()

    return call
