"""Attention transfer: every layer's new attention learns to return what the old attention returned.

    loss of a layer = sum_t |y_t - y*_t|^2 / sum_t |y*_t|^2

y* is the output of the old attention, y of the new for the same input of the layer, both after the output
projection. All layers learn from one forward pass of the old model, and gradients never leave a layer. Zhang
et al. 2025 (LoLCATs), section 3.1; there only feature maps are trained, here all weights of the attention.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.applications.linearizing.steps import Show, Steps
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.nn.stack.config import PROJECTIONS
from polyformer.nn.stack.multihead import MultiHeadAttention
from polyformer.training.machine import autocast

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
