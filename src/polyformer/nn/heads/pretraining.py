"""Two parallel heads: for the tokens, and for the text as a whole or the choice among several texts.

    loss = tokens' loss + sentence's loss

BERT's pre-training predicts masked tokens and whether the second sentence follows the first (Devlin
et al. 2019, section 3.1); ALBERT's predicts whether two sentences are in order (Lan et al. 2020, section
3.1). GPT predicts the next tokens of several texts while it chooses among them (Radford et al. 2018, section
3.2).
"""

import dataclasses
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.nn.heads.base import Head, HeadConfig, HeadInput, HeadOutput, HeadShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingConfig(HeadConfig):
    """Pre-training head: a token head and a sentence head, trained on the sum of their losses.

    `tokens` reads `labels`, `sentence` reads `sentence_labels`.
    """

    tokens: HeadConfig = dataclasses.field(default_factory=partial(HeadConfig.from_dict, "masked"))
    sentence: HeadConfig = dataclasses.field(default_factory=partial(HeadConfig.from_dict, "classify"))

    kind: ClassVar[str] = "pretraining"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1"

    @classmethod
    def examples(cls) -> tuple["PretrainingConfig", ...]:
        scored = {"kind": "classify", "num_labels": 1, "pooling": "last", "hidden": False}
        return cls(), cls(
            tokens=HeadConfig.from_dict("language_model"),
            sentence=HeadConfig.from_dict({"kind": "choose", "text": scored}),
        )

    def reusable_modules(self) -> dict[str, str]:
        """Return the parts of both heads, with the prefixes `tokens.` and `sentence.`."""
        heads = {"tokens": self.tokens, "sentence": self.sentence}
        return {
            part: ".".join(filter(None, (name, where)))
            for name, head in heads.items()
            for part, where in head.reusable_modules().items()
        }

    def with_max_positions(self, before: int, after: int) -> "PretrainingConfig":
        """Return the configuration with longer `tokens`; `sentence` does not depend on positions."""
        return dataclasses.replace(self, tokens=self.tokens.with_max_positions(before, after))

    def build(self, shape: HeadShape) -> "Pretraining":
        """Return the head of the tokens and the head of the text, for the same model."""
        return Pretraining(self, shape)

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor | None:
        """Return labels for the head of the tokens, [B, T]."""
        return self.tokens.example_labels(rows, length, vocab_size)

    def example_sentence_labels(self, rows: int) -> Tensor | None:
        """Return labels for the head of the text, [B]."""
        return self.sentence.example_labels(rows, 1, 1)


class Pretraining(Head):
    """A head with a pair of predictions: for the tokens, and for the text; for B questions with C choices
    each [B C, T, V] and [B, C]."""

    predicts_sentence = True

    def __init__(self, config: PretrainingConfig, shape: HeadShape):
        super().__init__()
        self.tokens, self.sentence = config.tokens.build(shape), config.sentence.build(shape)
        self.predicts_next = self.tokens.predicts_next
        self.reads_choices = self.sentence.reads_choices
        heads = self.tokens, self.sentence
        self.supports_vocabulary_parallel = all(head.supports_vocabulary_parallel for head in heads)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Return the sum of both losses, where either may be missing, and both predictions."""
        loss, tokens = self.tokens(inputs, labels)
        other, sentence = self.sentence(inputs, inputs.sentence_labels)
        # Labels of either head may be missing; without both there is no loss.
        losses = [term for term in (loss, other) if term is not None]
        return torch.stack(losses).sum() if losses else None, lambda: (tokens(), sentence())
