"""A trained model with another attention: the new attention learns from the old, then the model is tuned.

In attention transfer every layer's new attention learns to return what the old attention returned.

    loss of a layer = sum_t |y_t - y*_t|^2 / sum_t |y*_t|^2

y* is the output of the old attention, y of the new for the same input of the layer, both after the output
projection. All layers learn from one forward pass of the old model, and gradients never leave a layer. Zhang
et al. 2025 (LoLCATs), section 3.1; there only feature maps are trained, here all weights of the attention.

In low-rank tuning every projection W becomes W + B A while the model learns to predict a text.

A [r, in] and B [out, r] are the only weights that learn, and are added to W at the end. Hu et al. 2022
(LoRA), section 4.1, by the package peft; Zhang et al. 2025 (LoLCATs), section 3.2.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from polyformer.core.errors import InputError
from polyformer.core.imports import needs_extra
from polyformer.models.architectures import Transformer
from polyformer.nn.stack.config import PROJECTIONS
from polyformer.nn.stack.multihead import MultiHeadAttention
from polyformer.training.machine import autocast
from polyformer.training.optimizers import Linear

__all__ = ["check_tunable", "transfer_attention", "tune_low_rank"]

SCHEDULE = Linear(warmup=10, floor=0.05)
"""The learning rate rises for ten steps and falls to a twentieth at the last."""

Show = Callable[[int, float], None]
"""A function called after every step with the number of tokens read and the loss."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """Batches of `batch` rows in random order, again and again until `tokens` tokens have been read.

    rows: token ids, all of one length. precision: of `training.machine`, "no" for float32.
    """

    rows: Sequence[Sequence[int]]
    tokens: int
    batch: int = 4
    seed: int = 0
    precision: str = "no"

    @property
    def count(self) -> int:
        """Return the number of steps."""
        return max(1, self.tokens // (self.batch * len(self.rows[0])))

    def batches(self, device: torch.device) -> Iterator[Tensor]:
        """Yield the token ids [B, T] of every step."""
        table = torch.tensor(self.rows, device=device)
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.empty(0, dtype=torch.long)
        for _ in range(self.count):
            while len(order) < self.batch:
                order = torch.cat([order, torch.randperm(len(table), generator=generator)])
            yield table[order[: self.batch].to(device)]
            order = order[self.batch :]

    def train(
        self, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], float], show: Show
    ) -> None:
        """Update the parameters of `optimizer` after each batch.

        backward: computes the gradients of a batch of token ids and returns its loss.
        """
        rates = LambdaLR(optimizer, lambda done: SCHEDULE.factor(done + 1, self.count))
        device = optimizer.param_groups[0]["params"][0].device
        for number, ids in enumerate(self.batches(device), 1):
            loss = backward(ids)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
            show(number * ids.numel(), loss)


NEW_RATE, COPIED_RATE = 1e-2, 1e-3
"""Adam's learning rates of new weights, such as gates, and of the projections copied from the old model."""


def transfer_attention(
    old: Transformer, new: Transformer, steps: Steps, show: Show = lambda tokens, loss: None
) -> list[float]:
    """Train the self-attention of `new` in place, and return the loss of every layer in the last step.

    `new` is `old` converted to another attention: both have the same layers. Other weights do not change.
    Raises `InputError` for models with different layers.
    """
    pairs = list(_pairs(old, new))
    old.eval().requires_grad_(False)
    new.train().requires_grad_(False)
    optimizer = torch.optim.AdamW(_groups([attention for _, attention in pairs]), weight_decay=0.0)
    device = next(new.parameters()).device
    losses = [0.0] * len(pairs)

    def learn(layer: int) -> Any:
        def hook(module: nn.Module, arguments: Any, options: Any, output: tuple[Tensor, Any]) -> None:
            with torch.enable_grad(), autocast(steps.precision, device):
                actual, _ = pairs[layer][1](*arguments, **options)
                expected = output[0].float()
                loss = (actual.float() - expected).square().sum() / expected.square().sum()
            loss.backward()
            losses[layer] = float(loss.detach())

        return hook

    handles = [
        old_attention.register_forward_hook(learn(layer), with_kwargs=True)
        for layer, (old_attention, _) in enumerate(pairs)
    ]

    def backward(ids: Tensor) -> float:
        with torch.no_grad(), autocast(steps.precision, device):
            old(ids)
        return sum(losses) / len(losses)

    try:
        steps.train(optimizer, backward, show)
    finally:
        for handle in handles:
            handle.remove()
        old.requires_grad_(True)
        new.eval().requires_grad_(True)
    return losses


def _pairs(old: Transformer, new: Transformer) -> Iterator[tuple[MultiHeadAttention, MultiHeadAttention]]:
    """Yield the attention of each layer before and after the conversion."""
    for name in ("encoder", "decoder"):
        stacks = getattr(old, name), getattr(new, name)
        if None in stacks:
            continue
        layers = [list(stack.layers) for stack in stacks]
        if len(layers[0]) != len(layers[1]):
            raise InputError(
                f"transfer: expected {name}s with equally many layers, got {len(layers[0])} "
                f"and {len(layers[1])}"
            )
        yield from ((before.attention, after.attention) for before, after in zip(*layers))


def _groups(attentions: list[MultiHeadAttention]) -> list[dict[str, Any]]:
    """Return the parameters of the layers by learning rate; only these get gradients."""
    groups: dict[float, list[nn.Parameter]] = {NEW_RATE: [], COPIED_RATE: []}
    for attention in attentions:
        for name, parameter in attention.named_parameters():
            parameter.requires_grad_(True)
            copied = name.partition(".")[0] in PROJECTIONS
            groups[COPIED_RATE if copied else NEW_RATE].append(parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in groups.items() if parameters]


RANK, RATE = 8, 1e-3
TARGETS = ["query", "key", "value", "output", "up", "down"]
"""The projections that are tuned, by the ends of their names."""


def check_tunable(model: Transformer) -> None:
    """Raise `InputError` for a model that is not decoder-only, and without the package peft."""
    if model.decoder is None or model.encoder is not None:
        raise InputError("tune: expected a decoder-only model, which predicts the next token of a text")
    with needs_extra("linearize", "low-rank tuning needs the package peft"):
        import peft  # noqa: F401


def tune_low_rank(model: Transformer, steps: Steps, show: Show = lambda tokens, loss: None) -> Transformer:
    """Return the decoder tuned on the rows; its weights have the same names and shapes as before.

    Raises `InputError` as `check_tunable`.
    """
    check_tunable(model)
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft does not know the class of the model
        options = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS)
        tuned = peft.get_peft_model(cast(Any, model), options)
    device = next(model.parameters()).device
    weights = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    tuned.train()

    def backward(ids: Tensor) -> float:
        with autocast(steps.precision, device):
            loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss.detach())

    steps.train(torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0), backward, show)
    merged = cast(Any, tuned).merge_and_unload()
    return cast(Transformer, merged.eval().requires_grad_(True))
