"""The image classifier in the folder of a run or a checkpoint: a model and its task."""

from pathlib import Path
from typing import Any

from polyformer.data import DataConfig
from polyformer.models.architectures import VisionConfig
from polyformer.models.architectures.pretrained import RECIPE, label_names
from polyformer.models.checkpoints import config_of
from polyformer.training.recipes.run import Run, is_checkpoint, open_model
from polyformer.training.tasks import ImageClassification, ImageClassificationConfig


def image_classifier(folder: str | Path, device: str = "auto") -> tuple[ImageClassification, Any] | None:
    """Return the task and the model in `folder`, or None if it is not an image classifier."""
    folder = Path(folder)
    if (folder / RECIPE).is_file():
        run = Run.open(folder)
        if not isinstance(run.recipe.task, ImageClassificationConfig):
            return None
        return run.task_of(ImageClassification), run.model(device)
    config: Any = config_of(folder) if is_checkpoint(folder) else None
    if not isinstance(config, VisionConfig):
        return None
    model = open_model(folder, device)
    return task_of(model), model


def task_of(model: Any) -> ImageClassification:
    """Return the task that reads images like the model of a checkpoint."""
    config: VisionConfig = model.config
    each = config.num_channels
    return ImageClassificationConfig(
        labels=label_names(model),
        image_size=config.image_size,
        channels=each,
        mean=config.mean * (each // len(config.mean)),
        std=config.std * (each // len(config.std)),
    ).build()


def brought(task: ImageClassification) -> DataConfig:
    """Return the data options that convert images to the size and the colour mode of `task`."""
    mode = "grey" if task.config.channels == 1 else "rgb"
    return DataConfig(image_size=task.size, image_mode=mode, streaming=True)
