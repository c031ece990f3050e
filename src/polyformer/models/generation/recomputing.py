"""Generation without a cache: every step reads the whole text again, for a mechanism that keeps no state.

`RecomputingModel` is a model around the model. Its state is the text so far, so that searches, drafts and
streams use it as any other model.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from polyformer.core.errors import InputError, caution, quote
from polyformer.core.state import State
from polyformer.models.outputs import ModelOutput
from polyformer.nn.cache import CachePolicy


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
