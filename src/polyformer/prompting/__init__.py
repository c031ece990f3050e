"""Few-shot prompts: questions behind demonstrations, answered by a causal model that is not trained on them.

    demonstration  separator  demonstration  separator  question        each by one template

Where a question has choices, the answer is the likeliest of them (`scoring`); else what the model writes
(`answering`). Source: Brown et al. 2020 (GPT-3), section 2.4.
"""

from polyformer.prompting.answering import write_answers
from polyformer.prompting.questions import Example, Sources, read_examples, split_examples
from polyformer.prompting.scores import choice_metrics, text_metrics
from polyformer.prompting.scoring import choose_answers
from polyformer.prompting.template import Template

__all__ = [
    "Example",
    "Sources",
    "Template",
    "choice_metrics",
    "choose_answers",
    "read_examples",
    "split_examples",
    "text_metrics",
    "write_answers",
]
