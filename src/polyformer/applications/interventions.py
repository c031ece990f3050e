"""Interventions: change a model during its calls, and measure the effect of each head.

    with trace(model) as calls:
        calls.layer(3).head(5).output.set(0)
        model(ids)
    print(ablate(model, ids).ranking()[:10])

`trace` reads and replaces heads, weights, patterns and the residual stream. `ablate` measures the loss of a
text when the head's output is its mean, or zero.

    effect(l, h) = loss(y_lh := m_lh) - loss          m_lh = the mean of y_lh over all tokens, or 0

for the output y_lh [T, D] of head h in layer l. The estimate is of first order, for all heads at once:

    effect(l, h) ~ d loss / d a_lh at a = 0,  with y_lh + a_lh (m_lh - y_lh) as the output
                 = sum over tokens of (d loss / d y_lh) . (m_lh - y_lh)

Michel et al. 2019 (Are Sixteen Heads Really Better than One?), section 2.2, with zero as replacement.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.applications.intervention_sites import AttentionSite, hooked_sites
from polyformer.attention.patterns import Full, PerHead
from polyformer.attention.patterns.base import MaskMod, Pattern
from polyformer.attention.patterns.composition import as_pattern
from polyformer.core.errors import InputError, quote
from polyformer.core.modules import names_wrong_types
from polyformer.models.architectures import Transformer
from polyformer.nn.stack.feature_stack import HyperStack
from polyformer.nn.stack.stack import Stack

__all__ = ["Ablation", "TracedCalls", "ablate", "token_effects", "trace"]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedValue:
    """A tensor of every call: of all heads of a layer, of some heads, or of a residual stream.

    The methods add a reading or a change; these run in the order in which they were added.
    """

    site: AttentionSite
    kind: str
    heads: tuple[int, ...] | None = None  # None for the whole tensor

    def keep(self) -> list[Tensor]:
        """Return a list that receives the tensor of every call, with its graph, after earlier changes."""
        values: list[Tensor] = []

        def read(tensor: Tensor) -> Tensor:
            values.append(self._selected(tensor))
            return tensor

        self.site.changes[self.kind].append(read)
        return values

    def edit(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor by `change(tensor)`, which broadcasts to its shape."""

        def replaced(tensor: Tensor) -> Tensor:
            old = self._selected(tensor)
            new = torch.as_tensor(change(old), dtype=old.dtype, device=old.device)
            try:
                new = new.expand_as(old)
            except RuntimeError as error:
                raise InputError(
                    f"{self.kind} of {self.site.name}: expected a tensor that broadcasts to "
                    f"{tuple(old.shape)}, got {tuple(new.shape)}"
                ) from error
            if self.heads is None:
                return new
            return tensor.index_copy(1, torch.tensor(self.heads, device=tensor.device), new)

        self.site.changes[self.kind].append(replaced)

    def set(self, value: Tensor | float) -> None:
        """Replace the tensor by a number, or by a tensor that broadcasts to its shape."""
        self.edit(lambda _: torch.as_tensor(value))

    def _selected(self, tensor: Tensor) -> Tensor:
        return tensor if self.heads is None else tensor[:, self.heads]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedHeads:
    """Heads of an attention. With a KV cache Tq counts the tokens of each step, and Tk all tokens so far."""

    site: AttentionSite
    heads: tuple[int, ...] | None = None  # None for all

    @property
    def output(self) -> TracedValue:
        """The outputs [B, H, Tq, D], before the output projection."""
        return TracedValue(self.site, "output", self.heads)

    @property
    def weights(self) -> TracedValue:
        """The attention weights [B, H, Tq, Tk]; reading or changing them makes this layer compute all pairs.

        With a sink the weights are of the keys only: the sink's share is taken afterwards.
        """
        return TracedValue(self.site, "weights", self.heads)

    def limit(self, pattern: Pattern | MaskMod | str) -> None:
        """Remove the keys that `pattern` does not allow; the weights of the other keys sum to 1 again."""
        allowed = as_pattern(pattern)
        if self.heads is not None:
            heads = range(self.site.num_heads)
            allowed = PerHead(tuple(allowed if head in self.heads else Full() for head in heads))
        limited = lambda old: allowed if old is None else as_pattern(old) & allowed  # noqa: E731
        self.site.changes["pattern"].append(limited)

    @names_wrong_types
    def head(self, *numbers: int) -> "TracedHeads":
        """Return some of the heads; raises `InputError` for an unknown number."""
        for number in numbers:
            if not 0 <= number < self.site.num_heads:
                most = self.site.num_heads - 1
                raise InputError(f"head: expected 0 to {most} in {self.site.name}, got {number}")
        return TracedHeads(self.site, numbers)


class TracedLayer(TracedHeads):
    """The self-attention of a layer, and the residual stream around the layer."""

    @property
    def input(self) -> TracedValue:
        """The residual stream [B, T, E] before the layer."""
        return self._stream("input")

    @property
    def residual(self) -> TracedValue:
        """The residual stream [B, T, E] after the layer; with a post-norm block its norm is included."""
        return self._stream("residual")

    def _stream(self, kind: str) -> TracedValue:
        if not self.site.has_stream:
            raise InputError(f"{kind}: {self.site.name} has no single residual stream; change its output")
        return TracedValue(self.site, kind)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCalls:
    """The attention layers of a model while it is traced."""

    sites: list[AttentionSite]

    @functools.cached_property
    def layers(self) -> list[TracedLayer]:
        """All layers with self-attention, in the model's order."""
        return [TracedLayer(site) for site in self.sites if not site.cross]

    @names_wrong_types
    def layer(self, number: int, stack: str = "") -> TracedLayer:
        """Return a layer by its number in its stack.

        stack: "encoder" or "decoder", if the model has both; for a model of transformers any part of the
        layer's name. Raises `InputError` for no such layer or several.
        """
        return TracedLayer(self._site(number, stack, cross=False))

    @names_wrong_types
    def cross(self, number: int, stack: str = "") -> TracedHeads:
        """Return the cross-attention of a layer; see `layer`."""
        return TracedHeads(self._site(number, stack, cross=True))

    def _site(self, number: int, stack: str, cross: bool) -> AttentionSite:
        all_sites = [site for site in self.sites if site.cross == cross]
        sites = [site for site in all_sites if site.number == number and stack in site.name]
        if len(sites) == 1:
            return sites[0]
        names = [site.name for site in sites or all_sites]
        listed = ", ".join(names if len(names) < 5 else [*names[:2], "...", names[-1]]) or "none"
        of_stack = f" with {quote(stack)} in its name" if stack else ""
        raise InputError(
            f"layer: expected a single layer {number}{of_stack}, got {len(sites)}; there are {listed}"
        )


@contextlib.contextmanager
def trace(model: nn.Module) -> Iterator[TracedCalls]:
    """Read and replace values inside a model during its calls within the context.

        with polyformer.trace(model) as calls:
            calls.layer(3).head(5).output.set(0)          # ablate a head
            calls.layer(2).head(1).limit("Window(64)")    # cut attention edges
            calls.layer(2).weights.edit(change)           # weights [B, H, Tq, Tk] -> new weights
            stream = calls.layer(4).residual.keep()       # a list with a tensor per call
            model(ids)

    Gradients pass through every reading and change. Each step of `generate` is a call. The model is restored
    on exit. A model of transformers runs `attend` within the context, with the attachments of
    `polyformer.attach`, if any.

    Raises:
        InputError: a compiled model, or a model of transformers that does not dispatch. During a call:
            changed weights of a mechanism without a softmax over its keys, and a stack that computes its
            layers again in the backward pass.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a model of polyformer or of transformers, got {quote(model)}")
    with hooked_sites(model) as sites:
        yield TracedCalls(sites)


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
    model = _with_modules_of_its_own(model)
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
    model = _with_modules_of_its_own(model)
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


def _with_modules_of_its_own(model: nn.Module) -> nn.Module:
    """Return a copy of a model of polyformer that shares its parameters and buffers.

    Its mode and its range of layers can be changed while other threads call the model.
    """
    if not isinstance(model, Transformer):
        return model
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _resumable(model: nn.Module) -> Stack | None:
    """Return the stack of a decoder with layers that depend on the output of the previous layer only."""
    stack = model.decoder if isinstance(model, Transformer) else None
    several = stack is not None and (stack.reversible or isinstance(stack, HyperStack))  # streams
    return None if stack is None or several or stack.depth is not None else stack


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
