"""Classes that most families have in the same form."""

from typing import Any

from polyformer.models.checkpoints.config_mapping import Option, option
from polyformer.models.checkpoints.family import Task
from polyformer.nn.heads import ChooseConfig, ClassifyConfig, HeadConfig, SpanConfig, TagConfig

TOKEN_CLASSIFICATION = Task(TagConfig(), {"classifier": "head.output"})
QUESTION_ANSWERING = Task(SpanConfig(), {"qa_outputs": "head.output"})


def multiple_choice(pooler: str, text: HeadConfig | None = None, *options: Option, **more: Any) -> Task:
    """Return a task with a score for each choice by the head `text`; `pooler` is its hidden layer in
    files.
    """
    keys = {pooler: "head.text.dense", "classifier": "head.text.output"}
    return Task(ChooseConfig(text=text or ClassifyConfig(num_labels=1)), keys, options, **more)


def as_pooled(pooler: str) -> Task:
    """Return the same task, with the dropout of the hidden states instead of a classifier's own."""
    return multiple_choice(pooler, None, option("hidden_dropout_prob", 0.1, "text.dropout"), labelled=False)
