"""XLM-RoBERTa: RoBERTa on a hundred languages with one vocabulary of 250000. Conneau et al. 2020."""

from typing import ClassVar

from polyformer.checkpoints.families.roberta import Roberta, changed
from polyformer.checkpoints.family import register
from polyformer.presets import model_config


@register
class XlmRoberta(Roberta):
    """Its tensors have RoBERTa's names."""

    model_type = "xlm-roberta"
    classes = "XLMRoberta"
    paper = "Conneau et al. 2020"
    objective = "masked language modelling of a hundred languages"
    template = model_config("xlm-roberta-base")
    fields = changed(Roberta.fields, {"vocab_size": 30522})
    sizes: ClassVar = ("xlm-roberta-base", "xlm-roberta-large")
