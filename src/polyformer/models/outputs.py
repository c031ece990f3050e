"""What a model returns: named fields."""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_map

from polyformer.core.sequence.sequence_shards import SequenceShard
from polyformer.core.sequence.tokens import Tokens
from polyformer.core.state import State
from polyformer.nn.stack import LayerState


@dataclasses.dataclass(frozen=True)
class ModelState(State):
    """What a model needs to go on: its tokens so far, its layers' states, and what it reads from."""

    tokens: Tokens
    layers: tuple[LayerState, ...]
    source: Tensor | None = None  # encoder output [B, S, E]; None once every layer has projected it
    source_valid: Tensor | None = None  # [B, S]
    source_length: int = 0
    source_share: SequenceShard | None = None  # which of its tokens `source` has, where processes share them

    def reorder_beams(self, index: Tensor) -> "ModelState":
        """As `reorder_`, for an index among rows of one input each: source and padding stay in place."""
        return dataclasses.replace(self, layers=tuple(layer.reorder_beams(index) for layer in self.layers))

    def truncated_(self, count: int) -> "ModelState | None":
        """As for every state."""
        return self._parts_truncated(count)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadOutput:
    """Predictions that are there already."""

    value: Tensor | tuple[Tensor, Tensor]

    def __call__(self) -> Tensor | tuple[Tensor, Tensor]:
        return self.value


@dataclasses.dataclass(frozen=True, eq=False)
class ModelOutput:
    """Fields that were not asked for are None.

    loss: mean over the labelled items; in training with the auxiliary losses of its layers, such as those on
    spans. losses: the mean ("prediction") and each auxiliary loss by name, without gradients.
    last_hidden_state: [B, T, E]. hidden_states: the input of every layer and the final output. attentions and
    cross_attentions: one [B, H, Tq, Tk] a layer. The `encoder_` fields are those of the encoder of an
    encoder-decoder. state: pass it to the next call. slots: [T], which tokens of the sequence these are,
    where processes share it (`context_parallel`).

    A pytree of its tensors, predictions among them: `torch.export` gives it back, without the state. Where
    there is a loss they are computed when read in any case, unless a graph is traced.
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
        """The head's predictions, computed when read: with labels given, most callers need the loss alone."""
        predictions = self.predictions()
        return predictions[0] if isinstance(predictions, tuple) else predictions

    @property
    def sentence_logits(self) -> Tensor | None:
        """What the head `pretraining` predicts of the whole text [B, labels]; None from other heads."""
        predictions = self.predictions()
        return predictions[1] if isinstance(predictions, tuple) else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields with the predictions themselves: how to make them cannot be pickled."""
        with torch.set_grad_enabled(self.last_hidden_state.requires_grad):  # as the other fields were made
            return {**self.__dict__, "predictions": HeadOutput(self.predictions())}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelOutput":
        """Return a copy of all values without the autograd graph, which torch does not copy."""
        predictions = HeadOutput(tree_map(_detached, self.predictions()))
        values = {name: tree_map(_detached, value) for name, value in vars(self).items()}
        return ModelOutput(**copy.deepcopy({**values, "predictions": predictions}, memo))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, (Tensor, State)) else value


@dataclasses.dataclass(frozen=True, eq=False)
class _Rest:
    """What of an output is no tensor."""

    predictions: Callable[[], Tensor | tuple[Tensor, Tensor]] | None
    state: ModelState | None


LEAVES = tuple(
    field.name for field in dataclasses.fields(ModelOutput) if field.name not in ("predictions", "state")
)


def _flatten(output: ModelOutput) -> tuple[list[Any], _Rest | None]:
    leaves = [getattr(output, name) for name in LEAVES]
    if torch.compiler.is_compiling():
        return [output.predictions(), *leaves], None
    if output.loss is not None:
        return [None, *leaves], _Rest(output.predictions, output.state)
    return [output.predictions(), *leaves], _Rest(None, output.state)


def _unflatten(leaves: Iterable[Any], rest: _Rest | None) -> ModelOutput:
    predictions, *others = leaves
    make = HeadOutput(predictions) if rest is None or rest.predictions is None else rest.predictions
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
