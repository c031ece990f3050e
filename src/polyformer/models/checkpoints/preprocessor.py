"""The file preprocessor_config.json: the pictures' conversion by transformers' image processor."""

from pathlib import Path
from typing import Any

from polyformer.core.files import read_json, write_json
from polyformer.models.checkpoints.config_mapping import Tree

PREPROCESSOR = "preprocessor_config.json"


def read_preprocessor(folder: Path, names: tuple[str, ...]) -> Tree:
    """Return the options `names` of the image processor in a folder, as far as they are set."""
    path = folder / PREPROCESSOR
    options = read_json(path, dict) if names and path.is_file() else {}
    return {name: options[name] for name in names if name in options}


def write_preprocessor(config: Any, folder: Path) -> None:
    """Write the image processor of a `VisionConfig`: it resizes and normalizes images."""
    height, width = config.image_size
    write_json(
        folder / PREPROCESSOR,
        {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": height, "width": width},
            "resample": 2,  # bilinear
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": _of_channels(config.mean, config.num_channels),
            "image_std": _of_channels(config.std, config.num_channels),
        },
    )


def _of_channels(numbers: tuple[float, ...], channels: int) -> list[float]:
    """Return a number for each channel."""
    return list(numbers) * channels if len(numbers) == 1 else list(numbers)
