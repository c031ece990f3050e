"""Classes that most families have in the same form."""

from polyformer.checkpoints.family import Task
from polyformer.heads import SpanConfig, TagConfig

TOKEN_CLASSIFICATION = Task(TagConfig(), {"classifier": "head.output"})
QUESTION_ANSWERING = Task(SpanConfig(), {"qa_outputs": "head.output"})
