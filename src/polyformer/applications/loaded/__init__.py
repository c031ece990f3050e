"""Trained models by what they can do: classify, tag, translate, continue, embed, answer.

    model = polyformer.load("runs/sst2-1")
    model.classify("a gripping, funny film")        # Prediction(label='1', probability=0.98, ...)
    model.classify([Path("review.txt"), "dull"])    # a list of predictions

The class of the object depends on the task of the run, or on the head of the checkpoint; the commands of the
command line call the same methods. The models that read are defined here: they classify texts, pairs of texts
and images, tag words, answer questions, choose, or only have vectors, also of images, which they then label
by their names without training. `writers` has the models that generate text.
"""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from polyformer.applications.loaded.base import (
    Choice,
    LabelledModel,
    LoadedModel,
    Prediction,
    TaggedWord,
    Verbatim,
    is_picture,
    pair_of,
    several,
    text_of,
    texts_of,
    warn,
)
from polyformer.applications.loaded.writers import Continuer, Extractor, TargetWriter
from polyformer.core.errors import InputError, quote
from polyformer.core.modules import evaluating, names_wrong_types
from polyformer.core.paths import checked_path
from polyformer.data import read
from polyformer.data.formats.images import SUFFIXES, picture_row
from polyformer.models.architectures import TowersConfig, VisionConfig
from polyformer.models.checkpoints import config_of
from polyformer.models.checkpoints.folder_files import embedding_head
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import ClassifyConfig
from polyformer.training import tasks
from polyformer.training.machine import choose_device
from polyformer.training.recipes.reader import Reader, Writer, check_head, command_of
from polyformer.training.recipes.run import Run, brought, is_checkpoint, open_model, task_of
from polyformer.training.tasks.text import TextTask

if TYPE_CHECKING:
    from polyformer.applications.encoder import TowerEncoder

__all__ = ["Choice", "LoadedModel", "Prediction", "TaggedWord", "Verbatim", "load", "load_for"]


class TextModel(LoadedModel):
    """A model that reads texts or pairs of texts."""

    @property
    def pairs(self) -> bool | None:
        """Return whether the model reads pairs of texts; None for a checkpoint, which does not record it."""
        return None if isinstance(self.task, Reader) else "pair" in self.task.config.needs

    def _columns(self, items: Sequence[Any]) -> tuple[list[str], list[str] | None]:
        """Return the texts, and the second texts of pairs or None; raise `InputError` for the other kind."""
        pairs = self.pairs
        if pairs is None:
            pairs = isinstance(items[0], tuple)
        if pairs:
            both = [pair_of("inputs", item) for item in items]
            return [first for first, _ in both], [second for _, second in both]
        if any(isinstance(item, tuple) for item in items):
            raise InputError(
                f"inputs: expected single texts, for which {self.path} was trained, got a pair of texts"
                if self.pairs is False
                else "inputs: expected either only texts or only pairs of texts, got both"
            )
        return texts_of("inputs", items), None


class TextClassifier(TextModel, LabelledModel):
    """A classifier of texts or of pairs of texts."""

    command: ClassVar[str] = "classify"
    does: ClassVar[str] = "classify"

    def classify(self, inputs: Any) -> Any:
        def predictions(items: list[Any]) -> list[Prediction]:
            shares = self.task.classify(self.model, *self._columns(items))
            return [Prediction.of(probabilities) for probabilities in shares]

        return self._each(inputs, predictions)


class Regressor(TextModel):
    """A model that assigns a number to a text or a pair of texts; checkpoints may assign several."""

    command: ClassVar[str] = "classify"
    does: ClassVar[str] = "regress"

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the numbers of a checkpoint; empty for a run, whose number has no name."""
        return tuple(self.task.labels) if isinstance(self.task, Reader) else ()

    def regress(self, inputs: Any) -> Any:
        """Return the number of each text or pair of texts; by label name if the checkpoint has several."""

        def numbers(items: list[Any]) -> Sequence[float | Mapping[str, float]]:
            texts, pairs = self._columns(items)
            if not isinstance(self.task, Reader):
                return self.task.predict(self.model, texts, pairs)
            named = self.task.classify(self.model, texts, pairs)
            return [next(iter(values.values())) if len(values) == 1 else values for values in named]

        return self._each(inputs, numbers)


class ImageClassifier(LabelledModel):
    """A classifier of images."""

    command: ClassVar[str] = "classify"
    does: ClassVar[str] = "classify"
    reads_text: ClassVar[bool] = False

    def classify(self, inputs: Any) -> Any:
        def predictions(items: list[Any]) -> list[Prediction]:
            rows = [self._row(item) for item in items]
            return [Prediction.of(shares) for shares in self.task.classify(self.model, rows)]

        return self._each(inputs, predictions)

    def _row(self, image: Any) -> dict[str, Any]:
        """Return the pixels of an image in the size and the colours of the model."""
        reading = brought(self.task)
        if is_picture(image):
            return picture_row(image, reading.image_size, reading.image_mode)
        if not isinstance(image, str | os.PathLike) or not os.fspath(image).lower().endswith(SUFFIXES):
            raise InputError(
                f"IMAGE: this model reads images; expected an image of Pillow, or a file name that ends with "
                f"one of {', '.join(SUFFIXES)}, got {quote(image)}; to evaluate a folder use polyformer "
                "evaluate RUN --data FOLDER"
            )
        return next(iter(read(reading, ("image", "height", "width"), os.fspath(image))))  # type: ignore[arg-type]


WORD = re.compile(r"[@#]?\w+(?:['\u2019.-]\w+)*|\S")  # words with inner punctuation; any other mark is a word


class Tagger(LabelledModel):
    """A model that tags the words of texts."""

    command: ClassVar[str] = "tag"
    does: ClassVar[str] = "tag"

    def tag(self, texts: Any) -> Any:
        def tagged(items: list[Any]) -> list[list[TaggedWord]]:
            sentences = [words_of(item) for item in items]
            tags = self.task.tag(self.model, sentences)
            return [[*map(TaggedWord, words, row)] for words, row in zip(sentences, tags)]

        return self._each(texts, tagged)


def words_of(text: Any) -> list[str]:
    """Return the words of a text, or of a tuple of words."""
    if isinstance(text, tuple):
        if not all(isinstance(word, str) for word in text):
            raise InputError(f"texts: expected a tuple of words, got {quote(text)}")
        return list(text)
    return WORD.findall(text_of("texts", text))


class Answerer(LoadedModel):
    """A model that answers questions by an excerpt of a text."""

    command: ClassVar[str] = "answer"
    does: ClassVar[str] = "answer"

    def answer(self, question: Any, context: Any) -> Any:
        def answers(items: list[Any]) -> list[str]:
            questions = texts_of("question", items)
            values, single = several(context)
            contexts = texts_of("context", values)
            contexts = contexts * len(questions) if single else contexts
            check_lengths("context", contexts, questions)
            rows = [{"question": asked, "context": text} for asked, text in zip(questions, contexts)]
            return self.task.answer(self.model, rows)

        return self._each(question, answers)


class Chooser(LoadedModel):
    """A model that chooses one of several texts."""

    command: ClassVar[str] = "choose"
    does: ClassVar[str] = "choose"

    def choose(self, question: Any, choices: Sequence[Any]) -> Any:
        def chosen(items: list[Any]) -> list[Choice]:
            questions, lists = texts_of("question", items), choice_lists(choices, len(items))
            rows = [{"text": text, "choices": options} for text, options in zip(questions, lists)]
            return [*map(Choice.of, lists, self.task.choose(self.model, rows))]

        return self._each(question, chosen)


def choice_lists(choices: Sequence[Any], questions: int) -> list[list[str]]:
    """Return the choices of each question; raise `InputError` for fewer than two choices."""
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise InputError(f"choices: expected a list of two or more texts, got {quote(choices)}")
    common = all(isinstance(choice, str) for choice in choices)
    lists = [texts_of("choices", options) for options in ([choices] * questions if common else choices)]
    check_lengths("choices", lists, range(questions))
    for options in lists:
        if len(options) < 2:
            raise InputError(f"choices: expected two or more texts, got {quote(options)}")
    return lists


def check_lengths(name: str, values: Sequence[Any], questions: Sequence[Any]) -> None:
    """Raise `InputError` if a list has another length than the list of questions."""
    if len(values) != len(questions):
        raise InputError(f"{name}: expected one for each of {len(questions)} questions, got {len(values)}")


class TextEncoder(LoadedModel):
    """A model of texts without labels and without generated text; it has vectors of texts."""

    does: ClassVar[str] = "embed"


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
    tasks.MaskedDiffusion: Continuer,
    tasks.InstructionTuning: Continuer,
    tasks.PreferenceTuning: Continuer,
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


TEMPLATE = "a photo of a {}."
"""The text of a label: Radford et al. 2021 (CLIP), section 3.1.4."""


class TextsAndImages(LoadedModel):
    """A model of two towers, such as CLIP."""

    command: ClassVar[str] = "classify"
    does: ClassVar[str] = "classify"
    reads_text: ClassVar[bool] = False  # its labels are texts; its inputs are images

    def __init__(self, path: Path, task: Any, model: Any):
        super().__init__(path, task, model)
        self.names: tuple[str, ...] = ()

    @property
    def can(self) -> tuple[str, ...]:
        return "predict", "classify", "embed"

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels; empty before some are set."""
        return self.names

    @cached_property
    def encoder(self) -> "TowerEncoder":
        """The encoder of texts and of images."""
        from polyformer.applications.encoder import TowerEncoder

        return TowerEncoder(self.path, self.model.scale.device, model=self.model)

    def with_labels(self, names: str | Sequence[str] | None) -> Self:
        """Return this model with labels: a list, or a text of names separated by commas.

        Raises `InputError` for fewer than two labels.
        """
        listed = names.split(",") if isinstance(names, str) else list(names or ())
        labels = tuple(dict.fromkeys(name.strip() for name in listed if name.strip()))
        if len(labels) < 2:
            raise InputError(
                f"labels: expected the names of two or more labels, got {quote(list(labels))}; on the "
                'command line --labels "cat, dog"'
            )
        chosen = copy.copy(self)
        chosen.names = labels
        return chosen

    def classify(self, inputs: Any, labels: Sequence[str] | None = None, template: str = TEMPLATE) -> Any:
        """Return a `Prediction` for each image: the names of files or of folders, or images of Pillow.

        labels: names of the labels; None: those of `with_labels`. template: the text of a label, with {} for
        its name.
        """
        model = self if labels is None and self.names else self.with_labels(labels)
        if "{}" not in template:
            raise InputError(f"template: expected a text with {{}} for the label, got {quote(template)}")
        images, single = self._images(inputs)
        with evaluating(self.model), torch.no_grad():
            texts = self.encoder.of_texts([template.replace("{}", name) for name in model.names]).vectors
            vectors = self.encoder.of_images(images)
            device = self.model.scale.device
            shares = self.model.probabilities(texts.to(device), vectors.to(device)).tolist()
        results = [Prediction.of(dict(zip(model.names, row))) for row in shares]
        return results[0] if single else results

    def embed(self, texts: Any, pooling: str | None = None, normalize: bool = True) -> Any:
        """Return the vectors of texts or of images, float32 [inputs, width], or [width] for a single input.

        Names of image files and images of Pillow are images, all else is a text. Vectors have length 1.
        """
        if pooling is not None or not normalize:
            raise InputError("pooling, normalize: this model defines its vectors; leave them out")
        items, single = several(texts)
        pictures = [is_picture(item) or _names_image(item) for item in items]
        with evaluating(self.model):
            if any(pictures):
                if not all(pictures):
                    raise InputError("texts: expected either only texts or only images, got both")
                vectors = self.encoder.of_images(items)
            else:
                vectors, cut = self.encoder.of_texts(texts_of("texts", items))
                if cut:
                    warn(f"{len(cut)} of {len(items)} texts are cut to {self.encoder.max_length} tokens")
        return vectors[0].numpy() if single else vectors.numpy()

    def _images(self, inputs: Any) -> tuple[list[Any], bool]:
        """Return the images, and whether there was a single image instead of several."""
        from polyformer.applications.encoder import image_files

        items, single = several(inputs)
        images: list[Any] = []
        for item in items:
            if is_picture(item):
                images.append(item)
            elif not isinstance(item, str | os.PathLike) or not (Path(item).is_dir() or _names_image(item)):
                raise InputError(
                    f"IMAGE: expected an image of Pillow, a folder, or a file name that ends with one of "
                    f"{', '.join(SUFFIXES)}, got {quote(item)}"
                )
            else:
                images += image_files([os.fspath(item)])
        return images, single and len(images) == 1 and not (items and _is_folder(items[0]))


def _names_image(item: Any) -> bool:
    return isinstance(item, str | os.PathLike) and os.fspath(item).lower().endswith(SUFFIXES)


def _is_folder(item: Any) -> bool:
    return isinstance(item, str | os.PathLike) and Path(item).is_dir()
