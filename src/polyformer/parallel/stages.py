"""The stages of a pipeline: runs of a model's layers, each with the modules and the parameters that it needs.

Huang et al. 2019 (GPipe), section 2.
"""

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.core.auxiliary_losses import sum_auxiliary_losses
from polyformer.core.errors import InputError, quote
from polyformer.core.evaluation_mode import training_pass
from polyformer.model import Transformer
from polyformer.model.arguments import NOTHING_MORE
from polyformer.outputs import ModelOutput
from polyformer.sequence.inputs import ModelInputs
from polyformer.stack import Stack

READ = {field.name for field in dataclasses.fields(ModelInputs)} - {"input_ids", "inputs_embeds"}
"""What every stage reads beside the ids or hidden states, of a batch's entries."""

SHARE = "share"
"""The entry of a microbatch that says by how much its loss counts in that of the step: one number, [1]."""


def spans(layers: int, stages: int) -> list[range]:
    """The layers of each stage, as many as of any other or one more; `InputError` for too many stages."""
    if stages > layers:
        raise InputError(f"pipeline: {stages} stages for {layers} layers; use at most one a layer")
    edges = [layers * stage // stages for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def only_stack(model: nn.Module) -> Stack:
    """The stack of a model that a pipeline can run; `InputError` names what keeps it from doing so."""
    if not isinstance(model, Transformer):
        raise InputError(f"pipeline: it runs models of tokens, got {type(model).__name__}; set it to 1")
    if model.encoder is not None and model.decoder is not None:
        raise InputError("pipeline: an encoder-decoder has two stacks, of which it runs one; set it to 1")
    config = model.config.decoder or model.config.encoder
    stack = model.decoder or model.encoder
    assert config is not None
    assert stack is not None
    reasons = {
        f"block {quote(config.block.kind)}": stack.reversible,
        f"memory {quote(config.memory.kind)}": stack.memory is not None,
        f"depth {quote(config.depth.kind)}": stack.depth is not None,
        f"head {quote(model.config.head.kind)}": model.config.head.again,
    }
    for part, refused in reasons.items():
        if refused:
            raise InputError(f"pipeline: the {part} needs all layers in one process; set it to 1")
    return stack


def needed(model: Transformer, own: list[range]) -> list[nn.Module]:
    """The modules of which the stages with these layers have parameters."""
    stack = only_stack(model)
    embedding = model.decoder_embedding or model.encoder_embedding
    assert embedding is not None
    modules = [stack.position, *(stack.layers[stack.groups[layer]] for span in own for layer in span)]
    if any(span.start == 0 for span in own):
        modules += [model.tokens, embedding, *filter(None, [stack.convolution])]
    if any(span.stop == len(stack.groups) for span in own):
        modules += [stack.final_norm, model.head]
        modules += [model.tokens] if model.config.embedding.tied or model.config.embedding.adaptive else []
    return modules


def parameters_of(model: Transformer, own: list[range]) -> set[nn.Parameter]:
    """The parameters of the stages with these layers."""
    return {parameter for module in needed(model, own) for parameter in module.parameters()}


def drop_others(model: Transformer, own: list[range]) -> None:
    """Takes what the stages with these layers do not need out of `model`; what stays keeps its name."""
    stack, kept = only_stack(model), {id(module) for module in needed(model, own)}
    name = "decoder" if model.decoder is not None else "encoder"
    places: list[tuple[nn.Module, str]] = [(stack.layers, str(group)) for group in range(len(stack.layers))]
    places += [(stack, "final_norm"), (stack, "convolution")]
    places += [(model, "tokens"), (model, "head"), (model, f"{name}_embedding")]
    for parent, child in places:
        if id(getattr(parent, child)) not in kept and getattr(parent, child) is not None:
            setattr(parent, child, nn.Identity())


class Stage(nn.Module):
    """The layers `span` of a model: from ids [B, T] in the first stage, from hidden states [B, T, E] in later
    ones, to hidden states, and in the last one to the loss.

    precision: makes the context in which it computes. What its layers add to the loss enters the gradients
    where it arises, so it need not travel.
    """

    def __init__(
        self, model: Transformer, span: range, precision: Callable[[], AbstractContextManager[object]]
    ):
        super().__init__()
        self.model, self.span, self.precision = model, span, precision
        self.last = span.stop == len(only_stack(model).groups)

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor:
        """Hidden states [B, T, E] in the type of the parameters; the last stage's loss, a scalar."""
        share = batch.pop(SHARE)
        with self.precision():
            if self.last:
                loss = self.output(x, **batch).loss
                assert loss is not None
                return loss
            hidden, added = self.hidden(x, **batch)
        hidden = hidden.to(next(self.model.parameters()).dtype)
        return hidden if added is None else _WithLoss.apply(hidden, added, float(share))

    def hidden(self, x: Tensor, **batch: Any) -> tuple[Tensor, Tensor | None]:
        """The hidden states after these layers, and what the layers add to the training loss."""
        only_stack(self.model).span = self.span
        inputs = ModelInputs(**_first(x), **{name: batch[name] for name in READ & batch.keys()})
        with training_pass(self.model):
            side = self.model._side("decoder" if self.model.decoder is not None else "encoder")
            ran = side.run(inputs.with_placeholder_ids(), NOTHING_MORE, unpads=self.model.unpads)
        terms = sum_auxiliary_losses(ran.auxiliary_losses) if self.training else {}
        return ran.hidden, sum(terms.values()) if terms else None  # type: ignore[return-value]

    def output(self, x: Tensor, **batch: Any) -> ModelOutput:
        """What the model returns, by the last stage."""
        only_stack(self.model).span = self.span
        return self.model(
            **_first(x), **{name: value for name, value in batch.items() if name != "input_ids"}
        )


def _first(x: Tensor) -> dict[str, Tensor]:
    return {"inputs_embeds" if x.is_floating_point() else "input_ids": x}


class _WithLoss(torch.autograd.Function):
    """`hidden` as it is, and in the backward pass `share` times the gradients of the scalar `loss`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, share: float) -> Tensor:
        """hidden."""
        ctx.share, ctx.loss = share, loss.new_ones(())
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradients of hidden and of loss."""
        return grad, ctx.loss * ctx.share, None
