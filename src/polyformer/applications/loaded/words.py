"""Tags of words, answers to questions, choices, and models that only have vectors."""

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from polyformer.applications.loaded.base import LabelledModel, LoadedModel
from polyformer.applications.loaded.inputs import several, text_of, texts_of
from polyformer.applications.loaded.results import Choice, TaggedWord
from polyformer.core.errors import InputError, quote

WORD = re.compile(r"[@#]?\w+(?:['\u2019.-]\w+)*|\S")  # words with inner punctuation; any other mark is a word


class Tagger(LabelledModel):
    """A model that tags the words of texts."""

    command: ClassVar[str] = "tag"
    does: ClassVar[str] = "tag"

    def tag(self, texts: Any) -> Any:
        """Return a list of `TaggedWord` for each text; a tuple of words is a text that is already split."""

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
        """Return the answer to each question, an excerpt of the context; empty without an answer.

        context: a text for all questions, or a list with a text for each.
        """

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
        """Return a `Choice` for each question.

        choices: two or more texts for all questions, or for a list of questions a list of texts for each.
        """

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
