"""Masked language modelling: predict masked tokens. Devlin et al. 2019, section 3.1, task 1.

Every document is <cls> text <sep>; documents are packed into rows and do not attend to one another, or each
has rows of its own, for attention that cannot keep packed documents apart. Masked tokens are drawn anew in
every epoch (Liu et al. 2019, section 4.1) unless `masking` is static; in held-out text once for all.
"""

import dataclasses
from typing import ClassVar

from polyformer.data import Tokenizer
from polyformer.heads import HeadConfig, MaskedConfig
from polyformer.tasks.masking import MaskedDocuments, MaskedDocumentsConfig, TokenPrediction


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedModellingConfig(MaskedDocumentsConfig):
    """Predict masked tokens."""

    needs: ClassVar[tuple[str, ...]] = ("text",)
    kind: ClassVar[str] = "mlm"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1"

    def build(self, tokenizer: Tokenizer) -> "MaskedModelling":
        """The task with `tokenizer`."""
        return MaskedModelling(self, tokenizer)


class MaskedModelling(TokenPrediction, MaskedDocuments):
    """Metrics over the masked tokens: loss (nats a token), perplexity exp(loss), accuracy."""

    head: HeadConfig = MaskedConfig()
