"""Classes, heads and layers that most families have in the same form."""

from typing import Any

from polyformer.models.checkpoints.config_mapping import Option, option
from polyformer.models.checkpoints.family import Task
from polyformer.nn.heads import ChooseConfig, ClassifyConfig, EmbedConfig, HeadConfig, SpanConfig, TagConfig

FIRST_TOKEN = Task(EmbedConfig(pooling="first", normalize=False), prefixed=False)
LAST_TOKEN = Task(EmbedConfig(pooling="last", normalize=False), prefixed=False)
TOKEN_CLASSIFICATION = Task(TagConfig(), {"classifier": "head.output"})
QUESTION_ANSWERING = Task(SpanConfig(), {"qa_outputs": "head.output"})

# The classifier of decoders: only their last token has seen the whole text.
LAST_TOKEN_SCORES = ClassifyConfig(pooling="last", hidden=False, bias=False, dropout=0.0)

SCORED = Task(LAST_TOKEN_SCORES, {"score": "head.output"})

# The dropout of decoders that label tokens; transformers falls back on 0.1, not on another option.
TAG_DROPOUT = Option("classifier_dropout", None, ("dropout",), lambda p: 0.1 if p is None else p)


def pooled(pooler: str, *options: Option) -> Task:
    """Return the class without a task, with the layer `pooler` on the first token."""
    head = EmbedConfig(pooling="first", hidden=True, normalize=False)
    return Task(head, {pooler: "head.dense"}, options, prefixed=False)


def multiple_choice(pooler: str, text: HeadConfig | None = None, *options: Option, **more: Any) -> Task:
    """Return a task with a score for each choice by the head `text`; `pooler`: its hidden layer in files."""
    keys = {pooler: "head.text.dense", "classifier": "head.text.output"}
    return Task(ChooseConfig(text=text or ClassifyConfig(num_labels=1)), keys, options, **more)


def as_pooled(pooler: str) -> Task:
    """Return the same task, with the dropout of the hidden states instead of a classifier's own."""
    return multiple_choice(pooler, None, option("hidden_dropout_prob", 0.1, "text.dropout"), labelled=False)
