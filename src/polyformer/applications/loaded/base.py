"""The interface of a loaded model: a method for each ability, in batches, in the order of the inputs.

Inputs are texts, files and images, single or several. Results are small values with names. A class of this
package overrides the methods that its models support. The other methods raise an error that names what the
model can do.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch

from polyformer.core.errors import InputError, caution, quote
from polyformer.core.modules import evaluating
from polyformer.core.paths import checked_path
from polyformer.data.sources.files import whole_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from polyformer.applications.encoder import Encoder


@dataclass(frozen=True)
class Prediction:
    """The most probable label of an input, and the probability (0 to 1) of every label by its name.

    The probabilities sum to 1, except for a checkpoint with several labels per text (multi_label), in which
    every label has a probability of its own.
    """

    label: str
    probability: float
    probabilities: dict[str, float]

    @classmethod
    def of(cls, probabilities: Mapping[str, float]) -> Self:
        """Return the prediction with these probabilities; of equal labels the first is predicted."""
        label = max(probabilities, key=lambda name: probabilities[name])
        return cls(label, probabilities[label], dict(probabilities))


@dataclass(frozen=True)
class Choice:
    """The most probable choice, and the probability (0 to 1) of every choice in the order of the choices."""

    choice: str
    probability: float
    probabilities: tuple[float, ...]

    @classmethod
    def of(cls, choices: Sequence[str], probabilities: Sequence[float]) -> Self:
        """Return the choice with these probabilities; of equal choices the first."""
        best = max(range(len(choices)), key=probabilities.__getitem__)
        return cls(choices[best], probabilities[best], tuple(probabilities))


class TaggedWord(NamedTuple):
    """A word and its tag."""

    word: str
    tag: str


class Verbatim(str):
    """A text that is used as it is, even if a file has this name, such as a line of a file."""


def several(inputs: Any) -> tuple[list[Any], bool]:
    """Return the inputs as a list, and whether there was a single input instead of several.

    A text, a path, an image, a tuple (a pair of texts) and a mapping are single inputs. Raises `InputError`
    for a value that is neither an input nor iterable.
    """
    if isinstance(inputs, str | bytes | os.PathLike | tuple | Mapping) or is_picture(inputs):
        return [inputs], True
    if not isinstance(inputs, Iterable):
        raise InputError(f"expected an input or a list of inputs, got {quote(inputs)}")
    return list(inputs), False


def is_picture(value: object) -> bool:
    """Return whether `value` is an image of Pillow; Pillow is not imported."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def text_of(name: str, value: object) -> str:
    """Return a text: a string as it is, or the whole text of the file of a path.

    Raises `InputError` that names the argument `name` for another type, for a file that cannot be read, and
    for a string that is the name of an existing file.
    """
    if isinstance(value, os.PathLike):
        return whole_text(checked_path(Path(value)))
    if not isinstance(value, str):
        raise InputError(f"{name}: expected a text or the pathlib.Path of its file, got {quote(value)}")
    if not isinstance(value, Verbatim) and os.path.isfile(value):
        raise InputError(
            f"{name}: expected a text, got the name of a file, {quote(value)}; read the text of the file "
            f"with pathlib.Path({quote(value)})"
        )
    return str(value)


def texts_of(name: str, values: Iterable[object]) -> list[str]:
    """Return `text_of` of each value."""
    return [text_of(name, value) for value in values]


def pair_of(name: str, value: object) -> tuple[str, str]:
    """Return both texts of a pair, which is a tuple or a list; raise `InputError` for anything else."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InputError(f"{name}: expected a pair of texts, (first, second), got {quote(value)}")
    first, second = texts_of(name, value)
    return first, second


class LoadedModel:
    """A trained model; its methods take an input or a list of inputs, and return a result or a list.

    A text is a string, or the `pathlib.Path` of a file, which is read to its end.

    Args:
        path: the run or checkpoint.
        task: computes results with the model, as in the commands: a task of the run, or the reader of a
            checkpoint.
        model: the model, on its device and in evaluation mode.
    """

    command: ClassVar[str] = ""
    """The command that calls `does`, if there is one."""
    does: ClassVar[str]
    """The method that `predict` calls."""
    reads_text: ClassVar[bool] = True
    """Whether the model reads texts, so that they have vectors."""

    def __init__(self, path: Path, task: Any, model: Any):
        self.path, self.task, self.model = path, task, model
        self._encoders: dict[tuple[str | None, bool], Encoder] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}: {', '.join(self.can)}>"

    @property
    def can(self) -> tuple[str, ...]:
        """Return the names of the methods that the model supports."""
        return tuple(dict.fromkeys(["predict", *self.abilities, *(["embed"] if self.reads_text else [])]))

    @property
    def abilities(self) -> tuple[str, ...]:
        """Return the methods of the task of the model."""
        return (self.does,)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels in the order of the model's logits; empty for other models."""
        return ()

    def predict(self, *inputs: Any, **options: Any) -> Any:
        """Return the result of the method `does` with these arguments."""
        return getattr(self, self.does)(*inputs, **options)

    def classify(self, inputs: Any) -> Any:
        """Return a `Prediction` for each input: a text, a pair of texts (a tuple), or an image.

        An image is the name or path of a file, or an image of Pillow. Longer texts are cut or refused, as in
        training.
        """
        raise self.cannot("classify")

    def regress(self, inputs: Any) -> Any:
        """Return the number of each input: a text or a pair of texts (a tuple)."""
        raise self.cannot("regress")

    def tag(self, texts: Any) -> Any:
        """Return a list of `TaggedWord` for each text; a tuple of words is a text that is already split."""
        raise self.cannot("tag")

    def translate(
        self,
        texts: Any,
        num_beams: int | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> Any:
        """Return the translation of each text.

        num_beams: 1 is greedy decoding; by default as in the recipe or the checkpoint. The languages are
        codes, such as "en", of checkpoints that know several languages.
        """
        raise self.cannot("translate")

    def summarize(self, texts: Any, num_beams: int | None = None) -> Any:
        """Return the summary of each text."""
        raise self.cannot("summarize")

    def generate(
        self, prompts: Any = "", max_new_tokens: int | None = None, stop: str | None = None, **settings: Any
    ) -> Any:
        """Return each prompt with its continuation, as `polyformer generate` prints it.

        max_new_tokens: by default as in the checkpoint, else 64. stop: the text ends before this string.
        settings: names of transformers' generation settings, such as num_beams, top_p and temperature, and
        `seed`; sampling is on if one of its settings is present.
        """
        raise self.cannot("generate")

    def chat(
        self, messages: Any, max_new_tokens: int | None = None, stop: str | None = None, **settings: Any
    ) -> Any:
        """Return the reply to a conversation, or a list of replies to a list of conversations.

        messages: a list of mappings with "role" and "content", such as
        [{"role": "user", "content": "Hi"}]. max_new_tokens: by default as in the checkpoint, else 512. stop,
        settings: as in `generate`. tools: JSON schemas for the chat template, if it shows them.
        """
        raise self.cannot("chat")

    def answer(self, question: Any, context: Any) -> Any:
        """Return the answer to each question, an excerpt of the context; empty without an answer.

        context: a text for all questions, or a list with a text for each.
        """
        raise self.cannot("answer")

    def choose(self, question: Any, choices: Sequence[Any]) -> Any:
        """Return a `Choice` for each question.

        choices: two or more texts for all questions, or for a list of questions a list of texts for each.
        """
        raise self.cannot("choose")

    def embed(
        self, texts: Any, pooling: str | None = None, normalize: bool = True
    ) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Return the vectors of texts, float32 [texts, width], or [width] for a single text.

        Longer texts than the model reads are cut, with a warning.

        Args:
            texts: a text or a list of texts.
            pooling: mean, first, last or max of the last hidden states; None: as in the head or the folder
                of the model.
            normalize: with a `pooling`, whether vectors have length 1.

        Raises:
            InputError: no pooling is defined or it is defined twice.
        """
        if not self.reads_text:
            raise self.cannot("embed")
        items, single = several(texts)
        encoder = self.encoder_of(pooling, normalize)
        with evaluating(encoder.model):
            vectors, cut = encoder.vectors(texts_of("texts", items))
        if cut:
            warn(f"{len(cut)} of {len(items)} texts are cut to {encoder.max_length} tokens")
        return vectors[0].numpy() if single else vectors.numpy()

    def cannot(self, name: str) -> InputError:
        """Return the error for a method that the model does not support."""
        return InputError(f"{name}: not available for {self.path}; this model can {', '.join(self.can)}")

    def encoder_of(self, pooling: str | None, normalize: bool = True) -> "Encoder":
        """Return what computes the vectors of texts; arguments as in `embed`."""
        from polyformer.applications.encoder import Encoder

        if (pooling, normalize) not in self._encoders:
            device = next(self.model.parameters()).device
            model = None if pooling is None else self.model
            self._encoders[pooling, normalize] = Encoder(
                self.path, device, pooling, normalize=normalize, model=model
            )
        return self._encoders[pooling, normalize]

    def _each(self, inputs: Any, function: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return the results of `function` on the list of inputs, or the result of a single input."""
        items, single = several(inputs)
        with self._inference():
            results = list(function(items)) if items else []
        return results[0] if single else results

    @contextmanager
    def _inference(self) -> "Iterator[None]":
        """Compute in evaluation mode and without gradients; the notes of the task become warnings."""
        with evaluating(self.model), torch.no_grad():
            yield
        notes = getattr(self.task, "notes", [])
        while notes:
            warn(notes.pop(0))


class LabelledModel(LoadedModel):
    """A model whose task has labels."""

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.task.labels)


def warn(message: str) -> None:
    """Warn about inputs."""
    caution(message)
