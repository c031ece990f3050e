"""Reading a prompt: in chunks, for a decoder with sparse patterns in all heads, or again at each step.

A pass of n tokens writes n * F numbers in several steps of each layer (F the intermediate size). Beyond a few
thousand tokens they leave every cache, and the allocator returns their memory to the system after each step.
Chunks reuse it, and apart from the KV cache, only the last hidden states grow with n. Models with a dense
head read a prompt at once: the fused kernels are the fastest for equally many queries and keys.

A mechanism that keeps no state generates without a cache: every step reads the whole text again.
`RecomputingModel` is a model around the model. Its state is the text so far, so that searches, drafts and
streams use it as any other model.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Causal, Full
from polyformer.core.errors import InputError, caution, quote
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.state import State
from polyformer.models.outputs import ModelOutput, ModelState
from polyformer.nn.cache import CachePolicy
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


@dataclasses.dataclass(frozen=True)
class TextSoFar(State):
    """The inputs of a model so far.

    names, values: arguments with a number for each token [N, T], and `relation_ids` [N, T, T]. source_names,
    source_values: of the source of an encoder-decoder.
    """

    names: tuple[str, ...] = ()
    values: tuple[Tensor, ...] = ()
    source_names: tuple[str, ...] = ()
    source_values: tuple[Tensor, ...] = ()

    def reorder_beams(self, index: Tensor) -> Self:
        """Reorder as `reorder`; the source is in place, because all rows have the same input."""
        return dataclasses.replace(self, values=tuple(x.index_select(0, index) for x in self.values))

    def truncated_(self, count: int) -> Self:
        """Return the text without its last `count` tokens."""
        shorter = (
            x[:, : x.shape[1] - count, : x.shape[2] - count] if x.dim() == 3 else x[:, : x.shape[1] - count]
            for x in self.values
        )
        return dataclasses.replace(self, values=tuple(shorter))

    def inputs(self) -> dict[str, Tensor]:
        """Return all arguments of the model."""
        return dict(zip(self.names + self.source_names, self.values + self.source_values))

    def extended(self, ids: str, new: Mapping[str, Tensor]) -> Self:
        """Return this text followed by the tokens `new[ids]`; other inputs that are not in `new` continue."""
        if not self.values:
            shape = new[ids].shape
            rows = {name: x if x.dim() == 3 else x.expand(shape) for name, x in new.items()}
            return dataclasses.replace(self, names=tuple(rows), values=tuple(rows.values()))
        count = new[ids].shape[1]
        values = (
            torch.cat([x, new[name]], 1) if name in new else _continued(name, x, count)
            for name, x in zip(self.names, self.values)
        )
        return dataclasses.replace(self, values=tuple(values))


def _continued(name: str, past: Tensor, count: int) -> Tensor:
    """Return the values of an argument with those of `count` new tokens, which follow from the past."""
    if name == "relation_ids":  # no token has a relation to a new token
        return torch.nn.functional.pad(past, (0, count, 0, count), value=-1)
    last = past[:, -1:].expand(-1, count)
    if name == "attention_mask":
        last = torch.ones_like(last)
    elif name == "global_attention_mask":
        last = torch.zeros_like(last)
    elif name == "position_ids":
        last = last + torch.arange(1, count + 1, device=past.device)
    return torch.cat([past, last], 1)


class RecomputingModel:
    """The interface of a `model` with a cache, for a model without one; the source is encoded again too."""

    def __init__(self, model: Any):
        self.model = model
        self.ids = "input_ids" if model.encoder is None else "decoder_input_ids"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def new_state(self, reserve: int, cache: CachePolicy | None = None) -> TextSoFar:
        """Return the state before the first token; raises `InputError` for a cache policy."""
        if cache is not None:
            kind = quote(self.model.decoder.mechanism.kind)
            raise InputError(
                f"cache: mechanism {kind} keeps no keys, so no policy can drop some; leave the cache out"
            )
        return TextSoFar()

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, reserve: int = 0, **inputs: Tensor
    ) -> TextSoFar:
        """Return the state after the source of an encoder-decoder."""
        source = {"input_ids": input_ids, "attention_mask": attention_mask, **inputs}
        source = {name: x for name, x in source.items() if x is not None}
        return TextSoFar(source_names=tuple(source), source_values=tuple(source.values()))

    def following(self, ids: Tensor, state: TextSoFar, **inputs: Tensor) -> tuple[Tensor, TextSoFar]:
        """Return the hidden states [B, T, E] of tokens [B, T] after a text, and the next text."""
        arguments: dict[str, Any] = {"state": state, self.ids: ids, **inputs}
        output: Any = self(**arguments)
        return output.last_hidden_state, output.state

    def __call__(
        self, *, state: TextSoFar, output_hidden_states: bool = False, **inputs: Tensor | None
    ) -> ModelOutput:
        """Return the output for the tokens of `inputs` after the text in `state`, as a model with a cache."""
        new = {name: x for name, x in inputs.items() if x is not None}
        count, text = new[self.ids].shape[1], state.extended(self.ids, new)
        output = self.model(**text.inputs(), output_hidden_states=output_hidden_states)
        layers = output.hidden_states
        return dataclasses.replace(
            output,
            last_hidden_state=output.last_hidden_state[:, -count:],
            hidden_states=None if layers is None else tuple(layer[:, -count:] for layer in layers),
            state=text,
        )


def with_state(model: Any) -> Any:
    """Return `model`, or a `RecomputingModel` with a warning if its decoder's mechanism keeps no state."""
    if model.decoder is None or model.decoder.mechanism.supports_kv_cache:
        return model
    warn_of_recomputing(model.decoder.mechanism.kind)
    return RecomputingModel(model)


@functools.cache
def warn_of_recomputing(kind: str) -> None:
    """Warn once for a kind of mechanism."""
    caution(
        f"generate: mechanism {quote(kind)} keeps no cache, so the whole text is computed again for "
        "each token"
    )
