"""Multiple choice: a score for each of several texts, among which one answers a question.

    p(c) = softmax_c(score(text_c))

Each choice is appended to the question, and the resulting texts are scored independently. Radford
et al. 2018, section 3.3; Devlin et al. 2019, section 4.4 (SWAG).
"""

import dataclasses
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.nn.heads.base import Head, HeadConfig, HeadInput, HeadOutput, HeadShape
from polyformer.nn.heads.problem_types import mean_cross_entropy


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChooseConfig(HeadConfig):
    """Multiple-choice head: a softmax over the scores of several texts.

    `text`: the head with a single logit, 'classify', that scores a text.

    `separator`: the token that occurs twice between question and choice; all tokens of the choice are global
    if the caller marks none, as in Longformer.
    """

    text: HeadConfig = dataclasses.field(
        default_factory=partial(HeadConfig.from_dict, "classify(num_labels=1)")
    )
    separator: int | None = None

    kind: ClassVar[str] = "choose"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.4"

    def __post_init__(self) -> None:
        labels = getattr(self.text, "num_labels", None) if self.text.kind == "classify" else None
        if labels != 1:
            got = self.text.kind if labels is None else f"{labels} labels"
            raise InputError(f"text: expected the head 'classify' with num_labels=1, a score, got {got}")

    def reusable_modules(self) -> dict[str, str]:
        """Return the parts of the head that scores."""
        modules = self.text.reusable_modules()
        return {name: ".".join(filter(None, ("text", path))) for name, path in modules.items()}

    def global_attention_mask(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return 1 after the first separator and the next token; 0 in rows without a separator."""
        if self.separator is None:
            return None
        # True from the first separator on.
        after_separator = (ids == self.separator).cumsum(1) > 0
        # Shifted by two tokens, past both separators.
        in_choice = F.pad(after_separator, (2, 0))[:, : ids.shape[1]].long()
        return in_choice if mask is None else in_choice * mask

    def build(self, shape: HeadShape) -> "Choose":
        """Return the head with the head that scores, for the same model."""
        return Choose(self, shape)

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """Return the answer [1] of a question with all rows as its choices; [0] without rows."""
        return torch.randint(max(rows, 1), (min(rows, 1),))


class Choose(Head):
    """A head with labels [B] in 0..C-1, or -100; predictions [B, C], -inf for choices without tokens."""

    reads_choices = True

    def __init__(self, config: ChooseConfig, shape: HeadShape):
        super().__init__()
        self.text = config.text.build(shape)
        self.supports_vocabulary_parallel = self.text.supports_vocabulary_parallel

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Score texts [B C, T, E] in the order of their questions; without `choices` of one question."""
        _, logits = self.text(inputs, None)
        rows = len(inputs.hidden)
        choices = max(rows, 1) if inputs.choices is None else inputs.choices
        scores = logits().view(rows // choices, choices)
        if inputs.mask is not None:
            # A choice of padding only fills up a question with fewer choices.
            scores = scores.masked_fill(~inputs.mask.any(1).view_as(scores), -torch.inf)
        return None if labels is None else mean_cross_entropy(scores, labels), lambda: scores
