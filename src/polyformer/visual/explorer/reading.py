"""What a page is made of: a model and what it reads, and as what its tokens are shown."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from polyformer.core.errors import InputError, reason_of


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """An image whose patches are tokens, in raster order.

    pixels: uint8 [H, W, 1 or 3]. patch: its height and width in pixels. first: tokens before the first patch.
    tokens: of each patch; 3 where each colour of a pixel is one. patches: by stack the size of its patches,
    where it is another one's.
    """

    pixels: np.ndarray
    patch: tuple[int, int] = (1, 1)
    first: int = 0
    tokens: int = 1
    patches: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """A model and what it reads.

    inputs: what the model takes, one row: `input_ids` [1, T], and for an encoder-decoder `decoder_input_ids`.
    tokens: as what each token is shown, by stack ("encoder", "decoder"). prompt: how many of the decoder's
    tokens the model was given, where it generated the rest. before: what stands in each slot of the memory of
    earlier segments that the `state` among the inputs has, of which the first `compressed` stand for several
    tokens each. stored: what has entered the store of a memory, in order. picture: the image that was read.
    """

    name: str
    model: nn.Module
    inputs: Mapping[str, Any]
    tokens: Mapping[str, Sequence[str]]
    prompt: int | None = None
    before: Sequence[str] = ()
    compressed: int = 0
    stored: Sequence[str] = ()
    picture: Picture | None = None


def shown(rows: Mapping[str, Tensor], decode: Callable[[int], str]) -> dict[str, list[str]]:
    """As what each token of each row [1, T] is shown."""
    return {stack: [decode(number) for number in ids[0].tolist()] for stack, ids in rows.items()}


def run_alone(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    """What a model of transformers makes of the inputs; raises `InputError` where it asks for more, as those
    do that read an image and a text together, or fails in any other way."""
    try:
        return model(**inputs)
    except InputError:
        raise
    except Exception as error:  # each model raises its own
        reason = reason_of(error)
        names = " and ".join(inputs)
        raise InputError(f"model: {type(model).__name__} cannot read {names} alone: {reason}") from error
