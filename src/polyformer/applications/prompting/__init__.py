"""Few-shot prompts: questions after demonstrations, answered by a causal model without training on them.

    demonstration  separator  demonstration  separator  question        all by the same template

If a question has choices, the answer is the most likely choice (`scoring`), otherwise the generated text.
Source: Brown et al. 2020 (GPT-3), section 2.4.
"""

from polyformer.applications.prompting.questions import Example, Sources, read_examples, split_examples
from polyformer.applications.prompting.scoring import (
    choice_metrics,
    choose_answers,
    text_metrics,
    write_answers,
)
from polyformer.applications.prompting.template import Template

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
