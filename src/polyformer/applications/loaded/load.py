"""`load`: the object for the task of a run, or for the head of a checkpoint."""

from pathlib import Path
from typing import Any

from polyformer.applications.loaded.base import LoadedModel
from polyformer.applications.loaded.classifiers import ImageClassifier, Regressor, TextClassifier
from polyformer.applications.loaded.towers import TextsAndImages
from polyformer.applications.loaded.words import Answerer, Chooser, Tagger, TextEncoder
from polyformer.applications.loaded.writers import Continuer, Extractor, TargetWriter
from polyformer.core.argument_types import names_wrong_types
from polyformer.core.errors import InputError, quote
from polyformer.core.paths import checked_path
from polyformer.models.architectures import TowersConfig, VisionConfig
from polyformer.models.checkpoints import config_of
from polyformer.models.checkpoints.sentence import embedding_head
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import ClassifyConfig
from polyformer.training import tasks
from polyformer.training.environment import choose_device
from polyformer.training.recipes.classifier import task_of
from polyformer.training.recipes.reader import Reader, check_head, command_of
from polyformer.training.recipes.run import Run, is_checkpoint, open_model
from polyformer.training.recipes.writer import Writer
from polyformer.training.tasks.text import TextTask

TASKS: dict[type[tasks.Task], type[LoadedModel]] = {
    tasks.Classification: TextClassifier,
    tasks.PairRegression: Regressor,
    tasks.ImageClassification: ImageClassifier,
    tasks.Tagging: Tagger,
    tasks.QuestionAnswering: Answerer,
    tasks.MultipleChoice: Chooser,
    tasks.Extraction: Extractor,
    tasks.SequenceToSequence: TargetWriter,
    tasks.LanguageModelling: Continuer,
    TextTask: TextEncoder,  # the base class of the others comes last
}
"""The class of the object for each task."""

COMMANDS: dict[str | None, type[LoadedModel]] = {
    "answer": Answerer,
    "choose": Chooser,
    "classify": TextClassifier,
    "generate": Continuer,
    "tag": Tagger,
    "translate": TargetWriter,
}
"""The class for the command of a checkpoint's head."""


@names_wrong_types
def load(path: str | Path, device: str = "auto") -> LoadedModel:
    """Return the model in `path`, with a method for each thing that it can do (`LoadedModel`).

    Args:
        path: a run of `polyformer train`, the folder of a checkpoint of polyformer or transformers with its
            tokenizer, or a GGUF file.
        device: "auto" (cuda if there is a GPU, else cpu), "cpu" or "cuda".

    Raises:
        InputError: no model in `path`, or a run of a task that has no methods here, such as an agent.
    """
    return _opened(checked_path(path), None, device)


def load_for(path: str | Path, command: str, device: str = "auto") -> Any:
    """Return the same for a command; raise `InputError` before weights are read if it needs another model."""
    return _opened(checked_path(path), command, device)


def _opened(path: Path, command: str | None, device: str) -> LoadedModel:
    if is_checkpoint(path):
        return _of_checkpoint(path, command, device)
    run = Run.open(path)
    kind = _kind_of(run, command)
    return kind(path, run.task, run.model(device))


def _kind_of(run: Run, command: str | None) -> type[LoadedModel]:
    """Return the class for the task of a run; raise `InputError` if there is none, or not for `command`."""
    task = run.recipe.task.task
    kind = next((kind for base, kind in TASKS.items() if issubclass(task, base)), None)
    if kind is not None and command in (None, kind.command):
        return kind
    way = "evaluate it with polyformer evaluate"
    if kind is not None:
        way = f"use polyformer {kind.command}" if kind.command else "fine-tune it for another task"
    raise InputError(
        f"{run.folder}: a run of the task {quote(run.recipe.task.kind)}, which cannot do this; {way}"
    )


def _of_checkpoint(path: Path, command: str | None, device: str) -> LoadedModel:
    config: Any = config_of(path)
    if isinstance(config, VisionConfig) and command in (None, "classify"):
        model = open_model(path, device)
        return ImageClassifier(path, task_of(model), model)
    if isinstance(config, TowersConfig) and command in (None, "classify"):
        return TextsAndImages(path, None, open_model(path, device))
    if command is not None:
        check_head(path, config, command)
    if not isinstance(config, ModelConfig):
        raise InputError(f"{path}: not a model of texts or images")
    known = command_of(config) if command is None else command
    if known is None or (command is None and path.is_dir() and embedding_head(path) is not None):
        head = embedding_head(path) if path.is_dir() else None
        return TextEncoder(path, None, open_model(path, device, head))
    reading = Writer if known in ("generate", "translate") else Reader
    task = reading(path, known, choose_device(device))
    return _class_for(known, config)(path, task, task.model)


def _class_for(command: str, config: ModelConfig) -> type[LoadedModel]:
    """Return the class for the head; a head with numbers instead of labels is a regression."""
    head = config.head
    single = isinstance(head, ClassifyConfig) and head.num_labels == 1 and head.problem != "multi_label"
    if single or (isinstance(head, ClassifyConfig) and head.problem == "regression"):
        return Regressor
    return COMMANDS[command]
