"""Forward and backward of a language model of GPT-2's shape, compared with transformers."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import nn

from polyformer.core.errors import InputError
from polyformer_lab.bench.passes import gpt2_pair
from polyformer_lab.bench.rows import OURS, Case, DeviceBench, Row
from polyformer_lab.bench.running import runner


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingBench(DeviceBench):
    """A training step (forward with loss, backward, and the optimizer's step if it is named); random
    weights and tokens.
    """

    batch: int = 2
    length: int = 512
    layers: int = 12
    hidden_size: int = 768
    heads: int = 12
    vocab_size: int = 50257
    dropout: float = 0.0  # of both models, everywhere in GPT-2 except in the attention weights
    optimizer: Literal["none", "adamw"] = "none"  # adamw: torch's fused one
    autocast: Literal["no", "bfloat16", "float16"] = "no"  # of the forward pass and the loss
    repeats: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.heads:
            raise InputError(
                f"hidden_size: expected a multiple of {self.heads} heads, got {self.hidden_size}"
            )

    def rows(self) -> Iterator[Row]:
        """Yield the only row."""
        end = "" if self.optimizer == "none" else f" with {self.optimizer}"
        what = f"{self.layers} layers of {self.hidden_size}, training step{end}"
        what = f"{what}, {self.batch} x {self.length} tokens"
        yield Row("training", what, self._cases, repeats=self.repeats)

    def _cases(self) -> Iterator[Case]:
        pair = gpt2_pair(self, max(1024, self.length), self.dropout, **self.place)
        tokens = self.batch * self.length
        ids = torch.randint(0, self.vocab_size, (self.batch, self.length), device=self.device)
        # Products with weights: forward, and twice the number backward. Attention, a few per cent at these
        # lengths, is left out.
        weights = 12 * self.layers * self.hidden_size**2 + self.vocab_size * self.hidden_size
        yield Case(
            {name: functools.partial(self._step, make, ids) for name, make in pair.makers.items()},
            work={"tokens": tokens, "TFLOP": 6.0 * weights * tokens / 1e12},
            flop=self.flop(**{OURS: 6.0 * weights * tokens}),
        )

    def _step(self, make: Callable[[], nn.Module], ids: torch.Tensor) -> Callable[[], None]:
        model = make().train()
        optimizer = None
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        autocast: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.autocast != "no":
            autocast = torch.autocast(ids.device.type, getattr(torch, self.autocast))

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with autocast:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if optimizer is not None:
                optimizer.step()

        return step


run = runner(TrainingBench)
