"""The effect of each head: the loss of a text when the head's output is its mean, or zero.

    effect(l, h) = loss(y_lh := m_lh) - loss          m_lh = the mean of y_lh over all tokens, or 0

for the output y_lh [T, D] of head h in layer l. The estimate is of first order, for all heads at once:

    effect(l, h) ~ d loss / d a_lh at a = 0,  with y_lh + a_lh (m_lh - y_lh) as the output
                 = sum over tokens of (d loss / d y_lh) . (m_lh - y_lh)

Michel et al. 2019 (Are Sixteen Heads Really Better than One?), section 2.2, with zero as replacement.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.applications.interventions.trace import trace
from polyformer.core.argument_types import names_wrong_types
from polyformer.core.errors import InputError, quote
from polyformer.models.architectures import Transformer
from polyformer.nn.stack.stack import Stack

Replacement = Literal["mean", "zero"]


@dataclasses.dataclass(frozen=True, eq=False)
class Ablation:
    """The mean loss per token in nats, and the rise of the loss without each head, [layers, H]."""

    loss: float
    effects: Tensor

    def ranking(self) -> list[tuple[int, int, float]]:
        """Return (layer, head, effect), the largest effect first."""
        rows = [(i, j, effect) for i, row in enumerate(self.effects.tolist()) for j, effect in enumerate(row)]
        return sorted(rows, key=lambda row: -row[2])


@names_wrong_types
def ablate(
    model: nn.Module,
    rows: Sequence[Tensor],
    by: Replacement = "mean",
    estimate: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Ablation:
    """Return the effect of every head of a causal language model on the loss of a text.

    Args:
        model: a decoder of polyformer, or a causal model of transformers.
        rows: token ids [B, T] each.
        by: the output of an ablated head: its mean over all rows and tokens, or zero.
        estimate: from a single backward pass per row instead of a forward pass per head.
        progress: receives the number of finished rows and of all rows.
    """
    check_decoder(model)
    if not len(rows):
        raise InputError("rows: expected token ids of at least one text, got none")
    training = model.training
    model.eval()
    try:
        means = replacements(model, rows, by)
        losses, effects = [], []
        for done, ids in enumerate(rows, 1):
            if estimate:
                own, per_head = estimated_effects(model, ids, means)
            else:
                own, per_token = token_effects(model, ids, means)
                per_head = per_token.double().mean((-2, -1))
            tokens = own.numel() / sum(row[:, 1:].numel() for row in rows)
            losses.append(tokens * own.double().mean())
            effects.append(tokens * per_head.double().cpu())
            progress(done, len(rows))
    finally:
        model.train(training)
    return Ablation(float(sum(losses)), torch.stack(effects).sum(0))


@torch.no_grad()
def replacements(model: nn.Module, rows: Sequence[Tensor], by: Replacement = "mean") -> list[Tensor]:
    """Return the output that replaces each head, [H, D] per layer: its mean over all tokens, or 0."""
    sums: list[Tensor] = []
    for ids in rows if by == "mean" else rows[:1]:
        with trace(model) as calls:
            outputs = [layer.output.keep() for layer in calls.layers]
            model(ids)
        new = [output[0].sum((0, 2)) for output in outputs]
        sums = [a + b for a, b in zip(sums, new)] if sums else new
    tokens = sum(ids.numel() for ids in rows)
    return [each / tokens if by == "mean" else torch.zeros_like(each) for each in sums]


@torch.no_grad()
def token_effects(model: nn.Module, ids: Tensor, means: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the losses [B, T-1] of ids [B, T], and their rises without each head, [layers, H, B, T-1]."""
    stack, effects = _resumable(model), []
    with trace(model) as calls:
        streams = [layer.residual.keep() for layer in calls.layers if stack is not None]
        losses = token_losses(model, ids)
    for layer, mean in enumerate(means):
        for head in range(len(mean)):
            with contextlib.ExitStack() as contexts:
                calls = contexts.enter_context(trace(model))
                calls.layers[layer].head(head).output.set(mean[head])
                if stack is not None and layer:  # from the stored output of the layer before it
                    contexts.enter_context(_resumed(stack, layer, streams[layer - 1][0]))
                effects.append(token_losses(model, ids) - losses)
    return losses, torch.stack(effects).view(len(means), -1, *losses.shape)


def estimated_effects(model: nn.Module, ids: Tensor, means: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the losses [B, T-1] of ids [B, T], and the estimated rise of their mean, [layers, H]."""
    shares = [mean.new_zeros(len(mean), requires_grad=True) for mean in means]
    with torch.enable_grad(), trace(model) as calls:
        for layer, share, mean in zip(calls.layers, shares, means):
            layer.output.edit(
                lambda y, a=share, m=mean: y + a.view(-1, 1, 1) * (m.unsqueeze(1) - y)  # [B, H, T, D]
            )
        losses = token_losses(model, ids)
    return losses.detach(), torch.stack(torch.autograd.grad(losses.mean(), shares))


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the losses [B, T-1] of the tokens ids [B, T] after the first."""
    logits = model(ids).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def check_decoder(model: Any) -> None:
    """Raise `InputError` for a model that does not predict the next token."""
    if isinstance(model, Transformer):
        causal = model.encoder is None and model.config.head.kind in ("language_model", "adaptive_softmax")
    else:
        causal = (
            hasattr(model, "can_generate") and model.can_generate() and not model.config.is_encoder_decoder
        )
    if not causal:
        raise InputError(f"model: expected a causal language model, got {quote(type(model).__name__)}")


def _resumable(model: nn.Module) -> Stack | None:
    """Return the stack of a decoder with layers that depend on the output of the previous layer only."""
    stack = model.decoder if isinstance(model, Transformer) else None
    return None if stack is None or stack.reversible or stack.depth is not None else stack


@contextlib.contextmanager
def _resumed(stack: Stack, layer: int, x: Tensor) -> Iterator[None]:
    """Let calls of a stack begin at `layer`, with the input x [B, T, E]."""
    whole, stack.layer_range = stack.layer_range, range(layer, stack.layer_range.stop)
    handle = stack.register_forward_pre_hook(lambda _, arguments: (x, *arguments[1:]))
    try:
        yield
    finally:
        stack.layer_range = whole
        handle.remove()
