"""Forward and backward of a language model of GPT-2's shape, beside transformers' own."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from polyformer.bench.machine import begin
from polyformer.bench.timing import in_turn, median
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.presets import create_model
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingBench(Config):
    """One training step (forward with loss, backward, the optimiser's if one is named); random weights and
    tokens."""

    batch: int = 2
    length: int = 512
    layers: int = 12
    hidden_size: int = 768
    heads: int = 12
    vocab_size: int = 50257
    dropout: float = 0.0  # of both models, wherever GPT-2 has one but in the attention weights
    optimizer: Literal["none", "adamw"] = "none"  # adamw: torch's fused one
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None  # of a CPU; by default torch's own choice
    repeats: int = 5

    def __post_init__(self) -> None:
        at_least(1, **{name: getattr(self, name) for name in ("batch", "length", "layers", "repeats")})
        at_least(1, heads=self.heads, vocab_size=self.vocab_size)
        if self.threads is not None:
            at_least(1, threads=self.threads)
        if self.hidden_size % self.heads:
            raise InputError(
                f"hidden_size: expected a multiple of {self.heads} heads, got {self.hidden_size}"
            )


def run(config: TrainingBench) -> dict[str, float]:
    """Median seconds a step by model; prints them with their ratio and tokens a second."""
    begin(config.threads)
    steps = {}
    for name, make in contenders(config).items():
        try:
            steps[name] = make()
        except ImportError:
            print(f"{name} is not installed: no comparison (pip install 'polyformer[peers]')")
    medians = {name: median(seconds) for name, seconds in in_turn(steps, config.repeats).items()}
    tokens = config.batch * config.length
    for name, seconds in medians.items():
        print(f"{name:13} {seconds * 1e3:9.1f} ms  {tokens / seconds:9.0f} tokens/s")
    if len(medians) == 2:
        print(f"polyformer is {medians['transformers'] / medians['polyformer']:.2f} times as fast")
    return medians


def contenders(config: TrainingBench) -> dict[str, Callable[[], Callable[[], None]]]:
    """Functions that make transformers' model and ours and return the step of each."""
    torch.manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (config.batch, config.length), device=config.device)

    def step(build: Callable[[TrainingBench], nn.Module]) -> Callable[[], Callable[[], None]]:
        return lambda: _step(build(config), ids, config)

    return {"transformers": step(_theirs), "polyformer": step(_ours)}


def _ours(config: TrainingBench) -> nn.Module:
    return create_model(
        "gpt2",
        num_hidden_layers=config.layers,
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_attention_heads=config.heads,
        vocab_size=config.vocab_size,
        dropout=config.dropout,
        max_position_embeddings=max(1024, config.length),
    )


def _theirs(config: TrainingBench) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rate = config.dropout
    shape = GPT2Config(
        n_layer=config.layers,
        n_embd=config.hidden_size,
        n_head=config.heads,
        vocab_size=config.vocab_size,
        n_positions=max(1024, config.length),
        resid_pdrop=rate,
        embd_pdrop=rate,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(shape)


def _step(model: nn.Module, ids: torch.Tensor, config: TrainingBench) -> Callable[[], None]:
    model.to(config.device, getattr(torch, config.dtype)).train()
    optimizer = None
    if config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step
