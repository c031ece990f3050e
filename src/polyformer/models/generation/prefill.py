"""Reading a long prompt in chunks, for a decoder with windows or other sparse patterns in all heads.

A pass of n tokens writes n * F numbers in several steps of each layer (F the intermediate size). Beyond a few
thousand tokens they leave every cache, and the allocator returns their memory to the system after each step.
Chunks reuse it, and apart from the KV cache, only the last hidden states grow with n. Models with a dense
head read a prompt at once: the fused kernels are the fastest for equally many queries and keys.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Causal, Full
from polyformer.core.kv_cache import KeyValueCache
from polyformer.models.outputs import ModelOutput, ModelState
from polyformer.nn.stack import LayerState, Stack

CHUNK = 1024
"""Tokens of each row in a chunk."""

DENSE = frozenset({Full(), Causal()})
"""Patterns of dense attention."""


def reads_in_chunks(stack: Stack | None, state: ModelState, input_ids: Tensor) -> bool:
    """Return whether chunks are faster for a prompt [B, T], and the same: every layer has only a KV cache."""
    if stack is None or input_ids.device.type != "cpu" or input_ids.shape[1] < 2 * CHUNK:
        return False
    if not stack.mechanism.supports_kv_cache:
        return False
    if stack.depth is not None or stack.memory is not None or not isinstance(stack.mechanism, SoftmaxConfig):
        return False
    patterns = [stack.mechanism.for_layer(number).pattern for number in stack.layer_range]
    heads = stack.sequence[0].attention.config.num_attention_heads
    if any(pattern is None or DENSE & pattern.heads_by_pattern(heads).keys() for pattern in patterns):
        return False
    return all(map(_has_cache_only, state.layers))


def _has_cache_only(layer: LayerState) -> bool:
    own = layer.self_attention
    return type(own) is KeyValueCache and layer == LayerState(own)


def read_in_chunks(
    run: Callable[..., ModelOutput], input_ids: Tensor, attention_mask: Tensor | None, state: ModelState
) -> ModelOutput:
    """Return the output of the last chunk, with the hidden states [B, T, E] of all tokens.

    run: the model. attention_mask: [B, T], False for padding.
    """
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask = None
    parts = input_ids.split(CHUNK, 1)
    masks = [None] * len(parts) if attention_mask is None else attention_mask.split(CHUNK, 1)
    hidden: list[Tensor] = []
    output: ModelOutput | None = None
    for ids, mask in zip(parts, masks):
        output = run(input_ids=ids, attention_mask=mask, state=state if output is None else output.state)
        hidden.append(output.last_hidden_state)
    assert output is not None
    return dataclasses.replace(output, last_hidden_state=torch.cat(hidden, 1))
