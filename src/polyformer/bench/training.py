"""Forward and backward of a language model of GPT-2's shape, beside transformers' own."""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from polyformer.bench.timing import in_turn, median
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.presets import create_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingBench(Config):
    """One training step (forward with loss, backward), random weights and tokens; no optimiser."""

    batch: int = 2
    length: int = 512
    layers: int = 12
    dropout: float = (
        0.0  # of both models, wherever GPT-2 has one but in the attention weights, which ours lacks
    )
    device: str = "cpu"
    dtype: str = "float32"
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("batch", "length", "layers", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")


def run(config: TrainingBench) -> dict[str, float]:
    """Median seconds a step by model; prints them with their ratio and tokens a second."""
    dtype = getattr(torch, config.dtype)
    positions = max(1024, config.length)
    ours = create_model(
        "gpt2", num_hidden_layers=config.layers, dropout=config.dropout, max_position_embeddings=positions
    )
    models: dict[str, nn.Module] = {"polyformer": ours}
    try:
        models = {"transformers": _theirs(config, positions), **models}
    except ImportError:
        print("transformers is not installed: no comparison (pip install 'polyformer[peers]')")
    ids = torch.randint(0, 50257, (config.batch, config.length), device=config.device)
    steps = {name: _step(model.to(config.device, dtype).train(), ids) for name, model in models.items()}
    medians = {name: median(seconds) for name, seconds in in_turn(steps, config.repeats).items()}
    for name, seconds in medians.items():
        print(f"{name:13} {seconds * 1e3:9.1f} ms  {ids.numel() / seconds:9.0f} tokens/s")
    if len(medians) == 2:
        print(f"polyformer is {medians['transformers'] / medians['polyformer']:.2f} times as fast")
    return medians


def _theirs(config: TrainingBench, positions: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rate = config.dropout
    shape = GPT2Config(
        n_layer=config.layers, n_positions=positions, resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=0.0
    )
    return GPT2LMHeadModel(shape)


def _step(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    return step
