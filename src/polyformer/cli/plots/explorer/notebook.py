"""The explorer in Python: a page for a model and its input, to show in a notebook or save to a file.

On request the page shows the effect of each head on the probability of each token.
"""

import dataclasses
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from polyformer.applications.interventions import check_decoder, replacements, token_effects
from polyformer.cli.plots.explorer.explore import MEGABYTES, page_of
from polyformer.cli.plots.explorer.images import (
    TransformersImages,
    part_for,
    patches_reading,
    pixels_reading,
    without_head,
)
from polyformer.cli.plots.explorer.reading import PolyformerTexts, Reading, TransformersTexts
from polyformer.core.errors import InputError
from polyformer.core.files import write_output
from polyformer.core.foreign_checkpoints import load_by_transformers
from polyformer.core.modules import evaluating
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import Transformer, VisionTransformer


def with_effects(reading: Reading) -> Reading:
    """Return the reading with the effects of heads: a forward pass per head, with its mean over the text.

    Raises `InputError` for a model that does not predict the next token, a memory, or a text of one token.
    """
    check_decoder(reading.model)
    if reading.inputs.keys() != {"input_ids"} or reading.inputs["input_ids"].shape[1] < 2 or reading.kept:
        raise InputError(
            "effects: expected a text of 2 tokens or more, without segments and cache policies; leave it out"
        )
    ids = reading.inputs["input_ids"]
    with evaluating(reading.model):
        losses, rises = token_effects(reading.model, ids, replacements(reading.model, [ids]))
    return dataclasses.replace(reading, effects=(losses[0], rises[:, :, 0]))


HEIGHT = 780
"""The height of a page within a notebook, in CSS pixels."""


@dataclasses.dataclass(frozen=True, eq=False)
class Explorer:
    """A page, which a notebook's cell shows in a frame without access to anything outside."""

    html: str
    height: int = HEIGHT

    def save(self, path: str | Path) -> None:
        """Write the page to a file; an existing file is replaced atomically."""
        write_output(path, self.html.encode())

    def _repr_html_(self) -> str:
        frame = f"width: 100%; height: {self.height}px; border: 0"
        content = html.escape(self.html, quote=True)
        allowed = "allow-scripts allow-downloads"  # pictures are saved as downloads
        return f'<iframe sandbox="{allowed}" title="Attention" style="{frame}" srcdoc="{content}"></iframe>'

    def __repr__(self) -> str:
        return f"<Explorer: a page of {len(self.html) / 1e6:.1f} MB; save(path) writes it>"


def explore(
    model: nn.Module,
    what: Any,
    *,
    against: Any = None,
    tokenizer: Any = None,
    title: str = "Attention explorer",
    megabytes: float = MEGABYTES,
    effects: bool = False,
    **options: Any,
) -> Explorer:
    """Return the page of `model`, a model of ours or of transformers', and its input.

    Args:
        what: a text; token ids, a list or a tensor [T] or [1, T], or a mapping with `input_ids` and for an
            encoder-decoder `decoder_input_ids`; an image, uint8 [H, W] or [H, W, 1 or 3] or Pillow's; or a
            `Reading`.
        against: another model, or another input, to compare with.
        tokenizer: the tokenizer of texts; for a vision model its image processor. By
            default it is loaded from the folder of the model.
        megabytes: the largest size of the page (see `page_of`).
        effects: whether the page also has the effect of each head on the probability of each token, for a
            causal language model; a forward pass per head.
        options: for a classifier of images `labels`, the names of its labels in their order; for texts
            `target`; for texts and models of ours also `generate` and `segment`, as in
            `polyformer explore`.

    Raises `InputError` for an input that the model cannot read, and if a tokenizer is required but missing.
    """
    readings = [reading(model, what, tokenizer, options)]
    if isinstance(against, nn.Module):
        readings.append(reading(against, what, tokenizer, options, "against"))
    elif against is not None:
        readings.append(reading(model, against, tokenizer, options, "against"))
    if effects:
        readings = [with_effects(each) for each in readings]
    return Explorer(page_of(*readings, title=title, megabytes=megabytes))


def reading(
    model: nn.Module, what: Any, tokenizer: Any, options: Mapping[str, Any], name: str = "model"
) -> Reading:
    """Return the reading for the page; see `explore`."""
    if isinstance(what, Reading):
        return what
    kinds = Transformer, VisionTransformer
    own = next((part for part in model.modules() if isinstance(part, kinds)), None)
    pixels = _pixels(what)
    if isinstance(own, VisionTransformer):
        if pixels is None:
            raise InputError("what: this model reads images; give one in uint8, [H, W] or [H, W, 1 or 3]")
        return patches_reading(name, own, pixels, options.get("labels", ()))
    if pixels is not None and own is not None:
        return pixels_reading(name, own, pixels)
    part = part_for(model, pixels is not None)
    if pixels is not None:
        processor = tokenizer or _transformers_reader(model, "AutoImageProcessor")
        backbone, classifier = without_head(part)
        return TransformersImages(name, backbone, processor, classifier).of_pixels(pixels)
    if isinstance(what, Mapping):
        what, target = what.get("input_ids"), what.get("decoder_input_ids")
        options = {**options, **({} if target is None else {"target": _ids(target)})}
    texts: Any
    if own is not None:
        texts = PolyformerTexts(name, own, tokenizer or _polyformer_tokenizer(own))
    else:
        reader = tokenizer or _transformers_reader(model, "AutoTokenizer", needed=isinstance(what, str))
        texts = TransformersTexts(name, part, reader)
    return texts.of_text(what, **options) if isinstance(what, str) else texts.of_ids(_ids(what), **options)


def _pixels(what: Any) -> np.ndarray | None:
    """Return an image as an array; None for anything else."""
    if isinstance(what, np.ndarray):
        return what if what.dtype == np.uint8 and what.ndim in (2, 3) else None
    if hasattr(what, "getbands"):  # Pillow's
        return np.asarray(what.convert("L" if len(what.getbands()) == 1 else "RGB"))
    return None


def _ids(what: Any) -> list[int]:
    """Return token ids as a list."""
    if isinstance(what, Tensor | np.ndarray):
        what = what.tolist()
    if isinstance(what, Sequence) and len(what) == 1 and isinstance(what[0], Sequence):
        what = what[0]
    if not isinstance(what, Sequence) or not what or not all(isinstance(number, int) for number in what):
        raise InputError(
            "what: expected a text, the ids of one row of tokens, or an image in uint8, got "
            f"{type(what).__name__}"
        )
    return list(what)


def _polyformer_tokenizer(model: Transformer) -> Any:
    """Return the tokenizer in the folder of a model; None if there is no folder or no tokenizer."""
    if model.folder is None:
        return None
    try:
        return load_tokenizer(model.folder)
    except InputError:
        return None


def _transformers_reader(model: Any, kind: str, needed: bool = True) -> Any:
    """Return the tokenizer or image processor next to the weights of a model of transformers."""
    folder = getattr(model, "name_or_path", None)
    try:
        if not folder:
            raise InputError("the model was loaded from no folder that holds one")
        return load_by_transformers(kind, folder)
    except InputError as error:
        if not needed:
            return None
        raise InputError(f"tokenizer: {error}; give tokenizer=...") from error
