"""Masked language modelling: predict masked tokens. Devlin et al. 2019, section 3.1, task 1.

Every document is <cls> text <sep>; documents are packed into rows and do not attend to each other, or have
separate rows, for attention that cannot separate packed documents. Masked tokens are redrawn in
every epoch (Liu et al. 2019, section 4.1) unless `masking` is static; they are fixed for held-out text.
"""

import dataclasses
from typing import ClassVar

from polyformer.nn.heads import HeadConfig, MaskedConfig
from polyformer.training.tasks.masking import MaskedDocuments, MaskedDocumentsConfig, TokenPrediction


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedModellingConfig(MaskedDocumentsConfig):
    """Masked language model (BERT): predict the masked tokens of a text."""

    kind: ClassVar[str] = "mlm"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1"


class MaskedModelling(TokenPrediction, MaskedDocuments, config=MaskedModellingConfig):
    """Masked language modelling, with metrics over the masked tokens.

    The metrics are loss (nats per token), perplexity exp(loss) and accuracy.
    """

    head: HeadConfig = MaskedConfig()
