"""What tasks share that predict one of several labels, by name."""

import dataclasses
from typing import Any, ClassVar

from polyformer.core.errors import InputError, quote
from polyformer.data import Tokenizer
from polyformer.heads import ClassifyConfig, HeadConfig, TagConfig
from polyformer.tasks.text import EncoderTask


class LabelTask(EncoderTask):
    """A task of an encoder with a head that has one logit for each of `labels`."""

    head_type: ClassVar[type[ClassifyConfig] | type[TagConfig]]

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if config.labels is None:
            raise InputError("labels: not known before the training data are; call resolve(rows)")
        self.labels: tuple[str, ...] = config.labels
        self.head: HeadConfig = self.head_type(num_labels=len(self.labels))
        self._ids = {label: number for number, label in enumerate(self.labels)}

    def fit_head(self, head: HeadConfig) -> HeadConfig:
        """The model's own head where it is of the right kind, with one logit for each label."""
        if isinstance(head, self.head_type):
            return dataclasses.replace(head, num_labels=len(self.labels))
        return self.head

    def label_id(self, label: str) -> int:
        """The number of a label; raises `InputError` for one that the training data do not have."""
        if label not in self._ids:
            names = f"{', '.join(map(repr, self.labels)):.200}"
            raise InputError(f"label: {quote(label)} was not seen in training, which had {names}")
        return self._ids[label]
