"""What of a model one process holds: its heads and inner widths, its layers, its part of every tensor."""

import dataclasses
import math
from typing import Any

import torch
from torch import nn

from polyformer.architecture import ModelConfig
from polyformer.core.errors import InputError, quote
from polyformer.feedforward.base import SizedConfig
from polyformer.heads.adaptive import AdaptiveSoftmax
from polyformer.model import Transformer, build_model
from polyformer.parallel.stages import needed, num_layers, spans

MOMENTS = {"adam": 2, "adamw": 2, "sgd": 1}
"""Numbers that an optimizer keeps of each parameter; sgd with momentum."""


@dataclasses.dataclass(frozen=True)
class Held:
    """Numbers in the parameters of a process, before and after they are divided over `shard`.

    whole: all that its layers have. part: what it keeps of them. layer: the largest layer. rest: what is in
    no layer, the token tables among them.
    """

    whole: int
    part: int
    layer: int
    rest: int


def divided(config: ModelConfig, tensor: int) -> ModelConfig:
    """The model of one of `tensor` processes: so many times fewer heads and inner numbers.

    Queries, keys, values and the first matrices of a feed-forward are divided by what they put out, the
    others by what they read, a vocabulary by its rows (Shoeybi et al. 2019, section 3); norms and residual
    vectors are whole in each. Raises `InputError` where it does not divide.
    """
    if tensor == 1:
        return config
    changes: dict[str, Any] = {"vocab_size": own_rows(config, tensor)}
    for name in ("encoder", "decoder"):
        stack = getattr(config, name)
        if stack is None:
            continue
        attention, feedforward = stack.attention, stack.feedforward
        if not isinstance(feedforward, SizedConfig):
            raise InputError(
                f"tensor={tensor}: predicted for feed-forwards with one inner layer, and {name} has "
                f"{quote(feedforward.kind)}; leave tensor out"
            )
        for number, what in (
            (attention.num_attention_heads, "heads"),
            (attention.kv_heads, "key-value heads"),
            (feedforward.intermediate_size, "inner numbers of the feed-forward"),
        ):
            if number % tensor:
                raise InputError(f"tensor={tensor} does not divide {number} {what} of the {name}")
        changes[name] = dataclasses.replace(
            stack,
            attention=dataclasses.replace(
                attention,
                num_attention_heads=attention.num_attention_heads // tensor,
                num_key_value_heads=attention.kv_heads // tensor,
                head_size=attention.width(config.hidden_size),
            ),
            feedforward=dataclasses.replace(
                feedforward, intermediate_size=feedforward.intermediate_size // tensor
            ),
        )
    return dataclasses.replace(config, **changes)


def own_rows(config: ModelConfig, tensor: int) -> int:
    """Rows of the token table in the first of `tensor` processes: all where it is not divided."""
    with torch.device("meta"):
        head = config.head.build(config.head_shape())
    whole = config.embedding.adaptive is not None or isinstance(head, AdaptiveSoftmax) or not head.divides
    return config.vocab_size if whole else -(-config.vocab_size // tensor)


def on_meta(config: ModelConfig) -> Transformer:
    """The model of `config`, in floating point, on the `meta` device."""
    with torch.device("meta"):
        model = build_model(dataclasses.replace(config, weights=None))
    assert isinstance(model, Transformer)
    return model


def held(model: Transformer, stage: int, stages: int, shard: int) -> Held:
    """What a process of `stage` holds of `model`, the whole of which stands on its `tensor` processes.

    Along `shard` (with `context`, which divides weights too) the first dimension of every tensor is cut
    into equal parts, the last of which may be smaller (torch's `fully_shard`): this counts the first
    process's.
    """
    parts = spans(num_layers(model), stages)
    modules = needed(model, [parts[stage]]) if stages > 1 else [model]
    own = {parameter for module in modules for parameter in module.parameters()}
    layers = [{*layer.parameters()} & own for layer in layers_of(model)]
    numbers = [sum(parameter.numel() for parameter in layer) for layer in layers]
    inside = set[nn.Parameter]().union(*layers)
    whole = sum(parameter.numel() for parameter in own)
    part = sum(
        -(-parameter.shape[0] // shard) * math.prod(parameter.shape[1:]) if parameter.dim() else 1
        for parameter in own
    )
    return Held(whole, part, max(numbers), sum(parameter.numel() for parameter in own - inside))


def layers_of(model: Transformer) -> list[nn.Module]:
    """The modules of all layers, the encoder's first; those that share weights once."""
    return [layer for stack in (model.encoder, model.decoder) if stack is not None for layer in stack.layers]
