"""The output of a model, and the state for its next call."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_map

from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.sequence.context import SequenceShard
from polyformer.core.sequence.tokens import Tokens
from polyformer.core.state import State, StateOfStates, tensors_in
from polyformer.nn.stack import LayerState


@dataclasses.dataclass(frozen=True)
class ModelState(StateOfStates):
    """The state between two calls: the tokens so far, the states of the layers, and the encoder output.

    owner: what a model must share with the model that wrote the layers' states, `Stack.owner`; None if it is
    not known, as in files of earlier versions.
    """

    tokens: Tokens
    layers: tuple[LayerState, ...]
    source: Tensor | None = None  # encoder output [B, S, E]; None once every layer has projected it
    source_valid: Tensor | None = None  # [B, S]
    source_length: int = 0
    source_shard: SequenceShard | None = None  # the part in `source`, with context parallelism
    source_pos: Tensor | None = None  # [B, S], positions; None for non-padding tokens counted from 0
    source_spans: Tensor | None = None  # [B, U, 2], for the pattern `SourceSpans`
    source_ids: Tensor | None = None  # [B, S], the source itself; None if it was read as vectors
    owner: tuple[str, ...] | None = None

    renamed: ClassVar[Mapping[str, str]] = {"source_share": "source_shard"}

    @property
    def rows(self) -> int | None:
        """See `State.rows`. The layers come first, since the tokens of a recorded step have other tables."""
        parts = (self.layers, self.source, self.tokens)
        return next((tensor.shape[0] for part in parts for tensor in tensors_in(part)), None)

    def after(self, tokens: Tokens, layers: tuple[LayerState, ...], source: Tensor | None) -> "ModelState":
        """Return the state after further tokens of the same text."""
        return ModelState(
            tokens,
            layers,
            source,
            self.source_valid,
            self.source_length,
            self.source_shard,
            self.source_pos,
            self.source_spans,
            self.source_ids,
            self.owner,
        )

    def reorder_beams(self, index: Tensor) -> "ModelState":
        """Reorder as `reorder_`, for an index among rows of the same input, so the source stays in place."""
        return dataclasses.replace(self, layers=tuple(layer.reorder_beams(index) for layer in self.layers))


@dataclasses.dataclass(frozen=True)
class TrajectoryState(State):
    """The state between two steps of acting: the layers' states after `length` tokens."""

    layers: tuple[LayerState, ...]
    length: int
    owner: tuple[str, ...] | None = None  # as in `ModelState`

    def last(self, count: int) -> "TrajectoryState":
        """Return the state with only the last `count` tokens, or unchanged if a layer keeps sums of the past
        instead of its tokens."""
        if self.length <= count or not all(
            isinstance(layer.self_attention, KeyValueCache) for layer in self.layers
        ):
            return self
        layers = tuple(
            dataclasses.replace(layer, self_attention=layer.self_attention.last(count))  # type: ignore[union-attr]
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers, length=count)


@dataclasses.dataclass(frozen=True, eq=False)
class ComputedPredictions:
    """Predictions that are already computed."""

    value: Tensor | tuple[Tensor, Tensor]

    def __call__(self) -> Tensor | tuple[Tensor, Tensor]:
        return self.value


@dataclasses.dataclass(frozen=True, eq=False)
class ModelOutput:
    """The output of a model; optional fields are None unless requested.

    loss: mean over the labelled items; in training with the auxiliary losses of the layers, such as those on
    spans. losses: the mean ("prediction") and each auxiliary loss by name, without gradients.
    last_hidden_state: [B, T, E]. hidden_states: the input of every layer and the final output. attentions,
    cross_attentions: [B, H, Tq, Tk] per layer. The `encoder_` fields describe the encoder of an
    encoder-decoder. state: pass it to the next call. slots: [T], the indices of these tokens in the sequence,
    with context parallelism.

    This is a pytree of its tensors and predictions, so `torch.export` can return it, without the state. With
    a loss, predictions are computed only when they are read, unless a graph is traced.
    """

    loss: Tensor | None
    last_hidden_state: Tensor
    predictions: Callable[[], Tensor | tuple[Tensor, Tensor]]
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None
    state: ModelState | None = None
    losses: dict[str, Tensor] | None = None
    slots: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Return the head's predictions, computed when read: training needs only the loss."""
        predictions = self.predictions()
        return predictions[0] if isinstance(predictions, tuple) else predictions

    @property
    def sentence_logits(self) -> Tensor | None:
        """Return the prediction [B, labels] of the head `pretraining` for the whole text, or None."""
        predictions = self.predictions()
        return predictions[1] if isinstance(predictions, tuple) else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields with computed predictions, as their function cannot be pickled."""
        with torch.set_grad_enabled(self.last_hidden_state.requires_grad):  # like the other fields
            return {**self.__dict__, "predictions": ComputedPredictions(self.predictions())}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelOutput":
        """Return a copy of all values without the autograd graph, which torch does not copy."""
        predictions = ComputedPredictions(tree_map(_detached, self.predictions()))
        values = {name: tree_map(_detached, value) for name, value in vars(self).items()}
        return ModelOutput(**copy.deepcopy({**values, "predictions": predictions}, memo))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, (Tensor, State)) else value


@dataclasses.dataclass(frozen=True, eq=False)
class _NonTensorFields:
    """The fields of an output that are not tensors."""

    predictions: Callable[[], Tensor | tuple[Tensor, Tensor]] | None
    state: ModelState | None


LEAVES = tuple(
    field.name for field in dataclasses.fields(ModelOutput) if field.name not in ("predictions", "state")
)


def _flatten(output: ModelOutput) -> tuple[list[Any], _NonTensorFields | None]:
    leaves = [getattr(output, name) for name in LEAVES]
    if torch.compiler.is_compiling():
        # A graph returns only tensors.
        return [output.predictions(), *leaves], None
    if output.loss is not None:
        return [None, *leaves], _NonTensorFields(output.predictions, output.state)
    return [output.predictions(), *leaves], _NonTensorFields(None, output.state)


def _unflatten(leaves: Iterable[Any], rest: _NonTensorFields | None) -> ModelOutput:
    predictions, *others = leaves
    make = ComputedPredictions(predictions) if rest is None or rest.predictions is None else rest.predictions
    state = None if rest is None else rest.state
    return ModelOutput(predictions=make, state=state, **dict(zip(LEAVES, others)))


register_pytree_node(
    ModelOutput,
    _flatten,
    _unflatten,
    serialized_type_name="polyformer.ModelOutput",
    to_dumpable_context=lambda rest: None,
    from_dumpable_context=lambda dumped: None,
)
