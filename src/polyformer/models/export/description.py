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
    model_type, `id2label`, `label2id` and max_position_embeddings.
    """
    try:
        _, fields, _ = find_family(model.config)
    except InputError:
        fields = {"model_type": "polyformer", "max_position_embeddings": longest}
    described: dict[str, Any] = dict(fields)
    if hasattr(model.config.head, "num_labels"):
        described |= hub_labels(label_names(model))
    write_json(folder / CONFIG, described)
    write_generation(model, folder)
