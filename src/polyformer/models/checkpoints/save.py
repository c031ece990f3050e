"""`save_pretrained(format="hub")`: a model in the format of transformers."""

from pathlib import Path

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.files import folder_for_files, tied_names, write_json, write_tensors
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.pretrained import CONFIG, hub_labels, known_labels, write_generation
from polyformer.models.checkpoints.config_mapping import differences
from polyformer.models.checkpoints.family import FAMILIES, Family
from polyformer.models.checkpoints.folder_files import write_preprocessor
from polyformer.models.checkpoints.tensors import INDEX, SINGLE
from polyformer.models.config import ModelConfig

# The bytes of weights above which they are written as several files.
SHARD = 5 * 1000**3


def save(model: Transformer, folder: Path, shard_size: int = SHARD) -> None:
    """Write config.json, the weights and, for an image model, preprocessor_config.json.

    Each file is complete or absent, and the index of several files is written last. Raises `InputError` for a
    model that belongs to no public family.
    """
    if model.config.weights is not None:
        raise InputError(
            f"format 'hub': this model's weights are {model.config.weights}, which public families do not "
            'support; convert them to floating point first: from_pretrained(..., weights="float32") or '
            "polyformer convert --weights float32"
        )
    family, hub, task = find_family(model.config)
    if "id2label" in hub and (names := known_labels(model)):
        hub |= hub_labels(names)
    image = [hub.pop(name) for name in family.image_options]
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) == 1:
        hub["dtype"] = str(next(iter(dtypes))).removeprefix("torch.")
    tensors = to_hub_tensors(family, model.config, task, dict(model.state_dict()))
    tensors |= cast_like(model.unused_tensors, dtypes)
    for name in tied_names(tensors):  # untied in their class: safetensors refuses shared memory
        tensors[name] = tensors[name].clone()
    with folder_for_files(folder):
        _write(folder, tensors, shard_size)
        write_generation(model, folder)
        if image:
            write_preprocessor(getattr(model.config, "towers", (model.config,))[-1], folder)
        write_json(folder / CONFIG, hub)


def find_family(config: ModelConfig) -> tuple[Family, dict[str, object], str]:
    """Return the family of a model (its own, or the closest possible), their configuration, and the task."""
    if config.origin is not None:
        family = FAMILIES[config.origin.model_type]
        return family, *family.hub_config(config)
    able, reasons = [], []
    for name in FAMILIES:
        family = FAMILIES[name]
        if not family.claims or not family.fits(config):
            continue
        try:
            able.append((family, *family.hub_config(config)))
        except InputError as error:
            reasons.append(str(error))
    if able:
        tree = config.to_dict()
        # The family with the nearest template: a Llama without windows is not a Mistral.
        return min(able, key=lambda choice: len(differences(choice[0].template.to_dict(), tree)))
    # A family without the head is farther away than any that differs in options.
    far = lambda reason: (reason.startswith("unknown head"), reason.count(";"))  # noqa: E731
    closest = min(reasons, key=far, default="none has these stacks")
    raise InputError(
        f"format 'hub': this model belongs to no public family (save it for transformers by "
        f"polyformer.models.transformers.wrap(model).save_pretrained); the nearest: {closest}"
    )


def to_hub_tensors(
    family: Family, config: ModelConfig, task: str, ours: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return their tensors for ours: weights, or their gradients."""
    return {
        link.theirs: link.converter.join([ours[name] for name in link.converter.ours])
        for link in family.links(config, task, ours)
    }


def cast_like(tensors: dict[str, Tensor], dtypes: set[torch.dtype]) -> dict[str, Tensor]:
    """Return `tensors` in the type of the weights, if these have a single type."""
    if len(dtypes) > 1:
        return tensors
    dtype = next(iter(dtypes))
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}


def _write(folder: Path, tensors: dict[str, Tensor], shard_size: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    remaining = shard_size
    for name, tensor in tensors.items():
        if tensor.nbytes > remaining and shards[-1]:
            shards.append({})
            remaining = shard_size
        shards[-1][name] = tensor
        remaining -= tensor.nbytes
    if len(shards) == 1:
        write_tensors(folder / SINGLE, tensors)
        (folder / INDEX).unlink(missing_ok=True)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    # Readers prefer the single file, which would be an older model's.
    (folder / SINGLE).unlink(missing_ok=True)
