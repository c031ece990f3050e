"""Question answering over distractors: a paragraph with the answer among other paragraphs.

Source: Hsieh et al. 2024 (RULER), section 3, with the prompt of its appendix; the questions are of a file in
SQuAD's format.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polyformer.applications.probing.base import ProbeTask, Sample
from polyformer.applications.probing.scoring import match_any

ASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words."
)


@dataclass(frozen=True)
class DistractedQuestions(ProbeTask):
    """Questions of `rows` {question, context, answers}; a unit is the paragraph of other questions.

    A generated text is right if it contains any of the human answers.
    """

    rows: Sequence[dict[str, Any]]
    paragraphs: Sequence[str]

    new_tokens: ClassVar[int] = 32
    score: Callable[[str, Sequence[str]], float] = staticmethod(match_any)

    @property
    def most(self) -> int:
        """The paragraphs besides the right paragraph."""
        return len(self.paragraphs) - 1

    def sample(self, units: int, draw: random.Random) -> Sample:
        """Return a sample; the paragraphs are in random order."""
        row = draw.choice(self.rows)
        order = draw.sample(self.paragraphs, len(self.paragraphs))
        chosen = [text for text in order if text != row["context"]][:units]
        place = draw.randint(0, len(chosen))
        chosen.insert(place, row["context"])
        text = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(chosen, 1))
        return Sample(
            f"{ASK}\n\nThe following are given documents.\n\n{text}\n\n{ASK}\n\nQuestion: {row['question']}",
            " Answer:",
            tuple(dict.fromkeys(row["answers"]["text"])),
            place / max(1, len(chosen) - 1),
        )
