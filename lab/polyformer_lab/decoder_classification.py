"""Classification by a decoder, from its last token (Radford et al. 2018, section 3.2).

A recipe imports this module.
"""

import dataclasses
from typing import ClassVar

from polyformer.nn.heads import ClassifyConfig, HeadConfig
from polyformer.training.tasks import Classification, ClassificationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderClassificationConfig(ClassificationConfig):
    """Text classification by a decoder."""

    kind: ClassVar[str] = "classify_by_decoder"
    paper: ClassVar[str] = "Radford et al. 2018 (GPT), section 3.2"


class DecoderClassification(Classification, config=DecoderClassificationConfig):
    """Classification with a linear layer on the hidden state of the last token."""

    stacks = "decoder"

    def fit_head(self, head: HeadConfig) -> HeadConfig:
        """Return the head of the task without BERT's hidden layer."""
        fitted = super().fit_head(head)
        assert isinstance(fitted, ClassifyConfig)
        return dataclasses.replace(fitted, pooling="last", hidden=False)
