"""Multiple choice: a score for each of several texts, one of which answers a question.

    p(c) = softmax_c(score(text_c))

A question is put before each of its choices, and every such text is scored by itself. Radford et al. 2018,
section 3.3; Devlin et al. 2019, section 4.4 (SWAG).
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.heads.base import Head, HeadConfig, HeadInput, HeadShape, Predicted
from polyformer.heads.problem_types import mean_cross_entropy


def _scored() -> HeadConfig:
    return HeadConfig.from_dict("classify(num_labels=1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChooseConfig(HeadConfig):
    """`text`: the head of one logit, 'classify', that scores a text.

    `separator`: what stands twice between question and choice; all tokens of the choice are global where the
    caller marks none, as Longformer's.
    """

    text: HeadConfig = dataclasses.field(default_factory=_scored)
    separator: int | None = None

    kind: ClassVar[str] = "choose"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.4"

    def __post_init__(self) -> None:
        labels = getattr(self.text, "num_labels", None) if self.text.kind == "classify" else None
        if labels != 1:
            way = "text: expected the head 'classify' of one label, a text's score"
            raise InputError(f"{way}, got {self.text.kind if labels is None else f'{labels} labels'}")

    def parts(self) -> dict[str, str]:
        """Those of the head that scores."""
        return {part: ".".join(filter(None, ("text", where))) for part, where in self.text.parts().items()}

    def marks(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """1 behind the first separator and the token after it; 0 everywhere in rows without one."""
        if self.separator is None:
            return None
        ended = (ids == self.separator).cumsum(1) > 0
        behind = F.pad(ended, (2, 0))[:, : ids.shape[1]].long()
        return behind if mask is None else behind * mask

    def build(self, shape: HeadShape) -> "Choose":
        """The head that scores, for the same model."""
        return Choose(self, shape)

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """The answer [1] of one question, whose choices are the rows; [0] without any."""
        return torch.randint(max(rows, 1), (min(rows, 1),))


class Choose(Head):
    """labels [B] in 0..C-1, -100 for none; predictions [B, C], -inf for a choice without a real token."""

    reads_choices = True

    def __init__(self, config: ChooseConfig, shape: HeadShape):
        super().__init__()
        self.text = config.text.build(shape)
        self.divides = self.text.divides

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> Predicted:
        """Texts [B C, T, E] in the order of their questions; without `choices` they are all of one."""
        _, logits = self.text(inputs, None)
        rows = len(inputs.hidden)
        choices = max(rows, 1) if inputs.choices is None else inputs.choices
        scores = logits().view(rows // choices, choices)
        if inputs.mask is not None:
            scores = scores.masked_fill(~inputs.mask.any(1).view_as(scores), -torch.inf)
        return None if labels is None else mean_cross_entropy(scores, labels), lambda: scores
