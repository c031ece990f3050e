"""The template that joins demonstrations and a question into one text."""

from collections.abc import Sequence
from dataclasses import dataclass

from polyformer.applications.prompting.questions import Example
from polyformer.core.errors import InputError, quote

INPUT, TARGET = "{input}", "{target}"


@dataclass(frozen=True)
class Template:
    """A template of prompts.

    form: of a demonstration, with `{input}` once and `{target}` at its end. separator: text between two.
    """

    form: str = "Input: {input}\nOutput: {target}"
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        counts = self.form.count(INPUT), self.form.count(TARGET)
        if counts != (1, 1) or not self.form.endswith(TARGET):
            raise InputError(
                f"template: expected {INPUT} once and {TARGET} at the end, as in 'Q: {INPUT} A: {TARGET}', "
                f"got {quote(self.form)}"
            )

    def demonstrations(self, examples: Sequence[Example]) -> str:
        """Return the text before every question; each example must have a target."""
        return "".join(self._filled(example, str(example.target)) + self.separator for example in examples)

    def question(self, example: Example, answer: str = "") -> str:
        """Return the question with an `answer`.

        Without an answer, trailing white space is removed, because tokens at the beginning of a word include
        it.
        """
        text = self._filled(example, answer)
        return text if answer else text.rstrip()

    def _filled(self, example: Example, target: str) -> str:
        head, tail = self.form.removesuffix(TARGET).split(INPUT)
        return head + example.input + tail + target
