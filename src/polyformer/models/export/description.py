"""config.json next to a graph: its labels, its longest text and its generation settings, for runtimes."""

from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.files import write_json
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.label_names import hub_labels, label_names
from polyformer.models.architectures.pretrained import CONFIG, write_generation
from polyformer.models.checkpoints.save import find_family


def write_description(model: Transformer, folder: Path, longest: int) -> None:
    """Write config.json, and generation_config.json if the model has generation settings.

    config.json has the fields of transformers, if the model belongs to a public family; otherwise only
    model_type, `id2label`, `label2id`, max_position_embeddings and the special tokens. An encoder-decoder
    always has its special tokens and is_encoder_decoder.
    """
    try:
        _, fields, _ = find_family(model.config)
    except InputError:
        fields = {"model_type": "polyformer", "max_position_embeddings": longest, **_special_tokens(model)}
    described: dict[str, Any] = dict(fields)
    if model.encoder is not None and model.decoder is not None:
        described = {**_special_tokens(model), **described, "is_encoder_decoder": True}
    if hasattr(model.config.head, "num_labels"):
        described |= hub_labels(label_names(model))
    write_json(folder / CONFIG, described)
    write_generation(model, folder)


def _special_tokens(model: Transformer) -> dict[str, int]:
    """Return the special tokens that the model has, with transformers' names."""
    special, both = model.config.special, model.encoder is not None and model.decoder is not None
    start = "decoder_start_token_id" if both else "bos_token_id"
    named = {"pad_token_id": special.pad, start: special.bos, "eos_token_id": special.eos}
    return {name: token for name, token in named.items() if token is not None}
