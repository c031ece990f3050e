"""Ways to damage a saved checkpoint, and the error that loading it then raises."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import polyformer
from polyformer.core.errors import InputError

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
    "max_position_embeddings": 20,
}


def fails(folder: Path, **options: object) -> str:
    """The message of the `InputError` that loading raises."""
    with pytest.raises(InputError) as caught:
        polyformer.from_pretrained(folder, **options)  # type: ignore[arg-type]
    return str(caught.value)


def edited(folder: Path, **changes: object) -> Path:
    """Changes values of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def reweighed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Saves the weights again after `change`, which edits the tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sharded(folder: Path) -> Path:
    """Saves the weights again in several files with an index."""
    from polyformer.models.checkpoints.save import save

    model = polyformer.from_pretrained(folder)
    save(model, folder, shard_size=4000)
    assert not (folder / "model.safetensors").exists()
    return folder


def indexed(folder: Path, weight_map: object, name: str = "model.safetensors.index.json") -> Path:
    """Writes an index of the weights' files: the file of each tensor, by the tensor's name."""
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))
    return folder
