"""How demonstrations and a question are put into one text."""

from collections.abc import Sequence
from dataclasses import dataclass

from polyformer.core.errors import InputError, quote
from polyformer.prompting.questions import Example

INPUT, TARGET = "{input}", "{target}"


@dataclass(frozen=True)
class Template:
    """`form`: a demonstration, `{input}` once and `{target}` at its end. `separator` stands between two."""

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
        """What stands before every question; each example has a target."""
        return "".join(self._filled(example, str(example.target)) + self.separator for example in examples)

    def question(self, example: Example, answer: str = "") -> str:
        """The question with an `answer`; without one, white space before it is left out: tokens that begin
        a word have it in them."""
        text = self._filled(example, answer)
        return text if answer else text.rstrip()

    def _filled(self, example: Example, target: str) -> str:
        head, tail = self.form.removesuffix(TARGET).split(INPUT)
        return head + example.input + tail + target
