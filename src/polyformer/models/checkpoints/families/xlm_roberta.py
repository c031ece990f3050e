"""XLM-RoBERTa: RoBERTa for a hundred languages with one vocabulary of 250000. Conneau et al. 2020."""

from typing import ClassVar

from polyformer.models.checkpoints.config_mapping import with_defaults
from polyformer.models.checkpoints.families.roberta import Roberta
from polyformer.models.checkpoints.family import register
from polyformer.models.presets import model_config


@register
class XlmRoberta(Roberta):
    """An encoder with RoBERTa's tensors and options."""

    model_type = "xlm-roberta"
    class_prefix = "XLMRoberta"
    paper = "Conneau et al. 2020"
    objective = "masked language modelling in 100 languages"
    template = model_config("xlm-roberta-base")
    config_mapping = with_defaults(Roberta.config_mapping, {"vocab_size": 30522})
    sizes: ClassVar = ("xlm-roberta-base", "xlm-roberta-large")
