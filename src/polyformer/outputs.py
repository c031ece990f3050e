"""What a model returns: named fields."""

import dataclasses
from collections.abc import Callable

from torch import Tensor

from polyformer.core.state import State
from polyformer.core.tokens import Tokens
from polyformer.stack import LayerState


@dataclasses.dataclass(frozen=True)
class ModelState(State):
    """What a model needs to go on: its tokens so far, its layers' states, and what it reads from."""

    tokens: Tokens
    layers: tuple[LayerState, ...]
    source: Tensor | None = None  # encoder output [B, S, E]; None once every layer has projected it
    source_valid: Tensor | None = None  # [B, S]
    source_length: int = 0

    def reorder_beams(self, index: Tensor) -> "ModelState":
        """As `reorder_`, for an index among rows of one input each: source and padding stay in place."""
        return dataclasses.replace(self, layers=tuple(layer.reorder_beams(index) for layer in self.layers))


@dataclasses.dataclass(frozen=True, eq=False)
class ModelOutput:
    """Fields that were not asked for are None.

    loss: mean over the labelled items; in training with the penalties of the model's parts, such as those on
    spans. losses: the mean ("prediction") and each penalty by name, without gradients. last_hidden_state:
    [B, T, E]. hidden_states: the input of every layer and the final output. attentions and
    cross_attentions: one [B, H, Tq, Tk] a layer. The `encoder_` fields are those of the encoder of an
    encoder-decoder. state: pass it to the next call.
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

    @property
    def logits(self) -> Tensor:
        """The head's predictions, computed when read: with labels given, most callers need the loss alone."""
        found = self.predictions()
        return found[0] if isinstance(found, tuple) else found

    @property
    def sentence_logits(self) -> Tensor | None:
        """What the head `pretraining` predicts of the whole text [B, labels]; None from other heads."""
        found = self.predictions()
        return found[1] if isinstance(found, tuple) else None
