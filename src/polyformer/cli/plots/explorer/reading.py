"""The input of a page: a model, its input, and the text of its tokens."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from torch import Tensor, nn

from polyformer.cli.plots.explorer.kept_keys import KeptKeys
from polyformer.core.errors import InputError, reason_of


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """An image with patches as tokens, in raster order.

    pixels: uint8 [H, W, 1 or 3]. patch: its height and width in pixels. first: tokens before the first patch.
    tokens: tokens per patch; 3 if each colour of a pixel is a token. patches: the size of patches by stack,
    if it differs.
    """

    pixels: np.ndarray
    patch: tuple[int, int] = (1, 1)
    first: int = 0
    tokens: int = 1
    patches: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The probability of each label by its name, the greatest first, and the right label; "" if unknown."""

    probabilities: Mapping[str, float]
    label: str = ""

    @classmethod
    def of(cls, logits: Tensor, names: Mapping[int, str]) -> Self:
        """Return the prediction of `logits` [labels]; a label without a name is LABEL_ and its number."""
        shares = logits.float().softmax(-1).tolist()
        order = sorted(range(len(shares)), key=lambda number: -shares[number])
        return cls(probabilities={names.get(number, f"LABEL_{number}"): shares[number] for number in order})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """A model and its input.

    inputs: the arguments of the model, one row: `input_ids` [1, T], and for an encoder-decoder
    `decoder_input_ids`. tokens: the text of each token, by stack ("encoder", "decoder"). prompt: the number
    of the decoder's tokens in the prompt, if the model generated the rest. before: the text of each slot in
    the memory of earlier segments, which is in the `state` among the inputs; each of the first `compressed`
    slots represents several tokens. stored: the tokens in the store of a memory, in order. kept: the keys
    that each layer of a decoder keeps, with a cache policy. picture: the image of the input. prediction: what
    a classifier predicts for it. effects: the losses of the tokens after the first [T-1], and their rises
    without each head [layers, H, T-1].
    """

    name: str
    model: nn.Module
    inputs: Mapping[str, Any]
    tokens: Mapping[str, Sequence[str]]
    prompt: int | None = None
    before: Sequence[str] = ()
    compressed: int = 0
    stored: Sequence[str] = ()
    kept: Sequence[KeptKeys | None] = ()
    picture: Picture | None = None
    prediction: Prediction | None = None
    effects: tuple[Tensor, Tensor] | None = None


def shown(rows: Mapping[str, Tensor], decode: Callable[[int], str]) -> dict[str, list[str]]:
    """Return the text of each token in each row [1, T]."""
    return {stack: [decode(number) for number in ids[0].tolist()] for stack, ids in rows.items()}


def run_alone(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    """Return the output of a model of transformers for the inputs.

    Raises `InputError` if the model requires more inputs, like models of an image and a text, or fails in any
    other way.
    """
    try:
        return model(**inputs)
    except InputError:
        raise
    except Exception as error:  # each model raises its own errors
        reason = reason_of(error)
        names = " and ".join(inputs)
        raise InputError(f"model: {type(model).__name__} cannot read {names} alone: {reason}") from error
