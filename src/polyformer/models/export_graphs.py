"""Models with state as functions of tensors, with KV caches as inputs and outputs.

A decoder is a single function; an encoder-decoder is two: one reads a source, the other decodes.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.sequence.context import Context, positions_from_mask
from polyformer.core.sequence.tokens import ModelInputs
from polyformer.models.architectures import Transformer
from polyformer.models.generation.fixed_step import FixedTokens
from polyformer.models.outputs import ModelState
from polyformer.nn.stack import LayerState, MultiHeadAttention, Stack
from polyformer.nn.stack.multihead import ProjectedSource


@dataclasses.dataclass(frozen=True)
class JoinedCache(KeyValueCache):
    """Keys and values [B, Hkv, P, D] of P earlier tokens, all filled; new ones are joined to a copy."""

    def context(self, context: Context, device: torch.device) -> Context:
        """Return the context itself: the cache has all keys."""
        return context

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, "JoinedCache"]:
        """Return all keys and values with the new ones last, and their cache."""
        assert self.keys is not None
        assert self.values is not None
        keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        return keys, values, JoinedCache(keys, values, keys.shape[2])


class DecoderGraph(nn.Module):
    """A decoder for `torch.export`, with the inputs and outputs of transformers' exported decoders.

    inputs: token ids [B, T], an attention mask [B, P + T] of the earlier tokens and these, and for each layer
    the keys and the values [B, Hkv, P, D] of P earlier tokens, 0 or more. outputs: logits [B, T, V], and the
    keys and values [B, Hkv, P + T, D] of the next call.
    """

    def __init__(self, model: Transformer):
        super().__init__()
        check_decoder(model)
        self.model = model
        assert model.decoder is not None
        attention = model.decoder.sequence[0].attention
        self.cache_shape = attention.config.kv_heads, attention.head_size
        layers, kinds = range(len(model.decoder.sequence)), ("key", "value")
        caches = [f"{layer}.{kind}" for layer in layers for kind in kinds]
        self.layers = tuple(map(str, layers))
        self.inputs = "input_ids", "attention_mask", *(f"past_key_values.{cache}" for cache in caches)
        self.outputs = "logits", *(f"present.{cache}" for cache in caches)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, and the keys and values of each layer."""
        before, new, device = past[0].shape[2], input_ids.shape[1], input_ids.device
        # Slices of the mask would set a least number of tokens, which is the sum of two lengths.
        mask = attention_mask[:, torch.arange(before + new, device=device)]
        slots = before + torch.arange(new, device=device)
        tokens = FixedTokens(before + new, mask.bool(), positions_from_mask(mask), slots=slots)
        caches = (JoinedCache(keys, values, before) for keys, values in zip(past[::2], past[1::2]))
        state = ModelState(tokens, tuple(map(LayerState, caches)))
        output = self.model(input_ids, state=state)
        present = [layer.self_attention for layer in output.state.layers]
        return output.logits, *(tensor for cache in present for tensor in (cache.keys, cache.values))

    def example(self, longest: int) -> tuple[Tensor, ...]:
        """Return inputs of two rows; torch takes lengths of 0 and 1, which are valid too, as constants."""
        weight, (heads, width) = next(self.model.parameters()), self.cache_shape
        new = max(2, min(3, longest // 2))
        cache = weight.new_zeros(2, heads, 2, width)
        ids, mask = (torch.ones(2, size, dtype=torch.long, device=weight.device) for size in (new, new + 2))
        return ids, mask, *(cache.clone() for _ in self.inputs[2:])

    def axes(self) -> dict[str, Any]:
        """Return the names of the axes that have any size, by argument of `forward`."""
        past = tuple({0: "batch", 2: "past"} for _ in self.inputs[2:])
        return {
            "input_ids": {0: "batch", 1: "length"},
            "attention_mask": {0: "batch", 1: "total"},
            "past": past,
        }


def check_decoder(model: Transformer) -> None:
    """Raise `InputError` for a decoder with a state that is more than a KV cache of each layer."""
    stack, reason = model.decoder, None
    assert stack is not None
    if not model.head.predicts_next:
        reason = f"its head {quote(model.config.head.kind)} does not predict the next token"
    elif stack.memory is not None or stack.depth is not None:
        reason = "a memory or a depth policy decides from step to step"
    elif not stack.mechanism.supports_kv_cache:
        reason = f"the mechanism {quote(stack.mechanism.kind)} has no cache"
    elif stack.sequence[0].attention.config.latent is not None:
        reason = "latent attention caches latents instead of keys and values"
    elif stack.aligns_source:
        reason = "its cross-attention compares positions of both texts"
    elif not all(map(_has_only_cache, stack.new_states(0))):
        reason = "its layers have another state"
    if reason is not None:
        raise InputError(
            f"cache: expected a decoder with only a KV cache in each layer, but {reason}; "
            "export it with cache=False, to read whole texts"
        )


def _has_only_cache(state: LayerState) -> bool:
    cache = state.self_attention
    return type(cache) is KeyValueCache and state == LayerState(cache)


KINDS = "key", "value"


class RowsGraph(nn.Module):
    """Base of the graphs that read whole texts in one stack, for `torch.export`.

    inputs: token ids and an attention mask [B, T], and token types [B, T] if the model has several.
    """

    length: ClassVar[str]
    """The name of the axis T."""

    def __init__(self, model: Transformer, stack: Stack):
        super().__init__()
        self.model = model
        self.layers = tuple(map(str, range(len(stack.sequence))))
        types = ["token_type_ids"] if model.config.embedding.type_vocab_size > 1 else []
        self.inputs = "input_ids", "attention_mask", *types

    def example(self, longest: int) -> tuple[Tensor, ...]:
        """Return inputs of two rows, with more tokens than a block of attention if possible."""
        shape, device = (2, min(301, longest)), next(self.model.parameters()).device
        return tuple(torch.ones(shape, dtype=torch.long, device=device) for _ in self.inputs)

    def axes(self) -> dict[str, Any]:
        """Return the names of the axes that have any size, by argument of `forward`."""
        return {name: {0: "batch", 1: self.length} for name in self.inputs}


class SourceGraph(RowsGraph):
    """The encoder of an encoder-decoder, with the projections that the decoder reads.

    outputs: the last hidden states [B, S, E], and for each layer of the decoder its keys and values
    [B, Hkv, S, D] of the source.
    """

    length = "source"

    def __init__(self, model: Transformer):
        assert model.decoder is not None
        check_decoder(model)
        assert model.encoder is not None
        super().__init__(model, model.encoder)
        projected = (
            f"present.{layer}.encoder.{kind}"
            for layer in range(len(model.decoder.sequence))
            for kind in KINDS
        )
        self.outputs = "last_hidden_state", *projected

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the last hidden states, and the source's keys and values of each layer."""
        source = ModelInputs(input_ids, attention_mask, token_type_ids=token_type_ids)
        hidden = self.model.read_source(source).hidden
        assert self.model.decoder is not None
        projected = [attention.project_source(hidden) for attention in cross_attentions(self.model.decoder)]
        return hidden, *(tensor for state in projected for tensor in (state.keys, state.values))


class TargetGraph(nn.Module):
    """The decoder of an encoder-decoder for `torch.export`, with the names of optimum's exported decoders.

    inputs: the next token ids [B, T] of the target, the mask [B, S] of the source, and of each layer the keys
    and values [B, Hkv, P, D] of P earlier tokens, 0 or more, then those [B, Hkv, S, D] of the source.
    outputs: logits [B, T, V], and the keys and values [B, Hkv, P + T, D] of the next call.
    """

    def __init__(self, model: Transformer):
        super().__init__()
        assert model.decoder is not None
        check_decoder(model)
        self.model = model
        layers = range(len(model.decoder.sequence))
        self.layers = tuple(name for layer in layers for name in (f"{layer}", f"{layer} (of the source)"))
        own = [f"{layer}.decoder.{kind}" for layer in layers for kind in KINDS]
        parts = [f"{layer}.{part}" for layer in layers for part in ("decoder", "encoder")]
        names = [f"past_key_values.{part}.{kind}" for part in parts for kind in KINDS]
        self.inputs = "input_ids", "encoder_attention_mask", *names
        self.outputs = "logits", *(f"present.{name}" for name in own)

    def forward(self, input_ids: Tensor, encoder_attention_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, and the keys and values of the target of each layer."""
        before, new, device = past[0].shape[2], input_ids.shape[1], input_ids.device
        slots = before + torch.arange(new, device=device)
        layers = (
            LayerState(JoinedCache(keys, values, before), ProjectedSource(*source))
            for keys, values, *source in zip(*(past[start::4] for start in range(4)))
        )
        state = ModelState(
            FixedTokens(before + new, slots=slots),
            tuple(layers),
            source_valid=encoder_attention_mask.bool(),
            source_length=encoder_attention_mask.shape[1],
        )
        output = self.model(decoder_input_ids=input_ids, state=state)
        present = [layer.self_attention for layer in output.state.layers]
        return output.logits, *(tensor for cache in present for tensor in (cache.keys, cache.values))

    def example(self, longest: int) -> tuple[Tensor, ...]:
        """Return inputs of two rows; torch takes lengths of 0 and 1, which are valid too, as constants."""
        assert self.model.decoder is not None
        new = max(2, min(3, longest // 2))
        source, weight = min(5, longest), next(self.model.parameters())
        ids = torch.ones(2, new, dtype=torch.long, device=weight.device)
        mask = torch.ones(2, source, dtype=torch.long, device=weight.device)
        caches = []
        stack = self.model.decoder
        for own, cross in zip((layer.attention for layer in stack.sequence), cross_attentions(stack)):
            for attention, length in (own, 2), (cross, source):
                heads = attention.config.kv_heads
                widths = attention.head_size, attention.value_size
                caches += [weight.new_zeros(2, heads, length, width) for width in widths]
        return ids, mask, *caches

    def axes(self) -> dict[str, Any]:
        """Return the names of the axes that have any size, by argument of `forward`."""
        past = tuple({0: "batch", 2: "source" if ".encoder." in name else "past"} for name in self.inputs[2:])
        return {
            "input_ids": {0: "batch", 1: "length"},
            "encoder_attention_mask": {0: "batch", 1: "source"},
            "past": past,
        }


def cross_attentions(decoder: Stack) -> list[MultiHeadAttention]:
    """Return the attentions of a decoder's layers to the source."""
    attentions = [layer.cross_attention for layer in decoder.sequence]
    return [attention for attention in attentions if attention is not None]
