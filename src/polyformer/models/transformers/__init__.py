"""Wrappers of polyformer models for transformers: `AutoModel*`, `pipeline`, `Trainer` and PEFT accept them.

    import polyformer.models.transformers as wrapped  # registers the model_type "polyformer"
    model = wrapped.wrap(polyformer.from_pretrained(DIR))
    model.save_pretrained(OUT)                                 # for AutoModelForMaskedLM.from_pretrained

Any model can be wrapped, of a public family or not: `wrap` chooses the class. Requires transformers
(`pip install 'polyformer[hub]'`).
"""

from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.models.auto import modeling_auto

from polyformer.core.errors import InputError, unknown
from polyformer.models.architectures import TrajectoryTransformer, Transformer
from polyformer.models.transformers.base import PolyformerModel
from polyformer.models.transformers.cache import PolyformerCache
from polyformer.models.transformers.saved_folder import PolyformerConfig, config_of
from polyformer.models.transformers.tasks import (
    PolyformerDecisionTransformer,
    PolyformerDoubleHeadsModel,
    PolyformerForCausalLM,
    PolyformerForMaskedLM,
    PolyformerForMultipleChoice,
    PolyformerForPreTraining,
    PolyformerForQuestionAnswering,
    PolyformerForSeq2SeqLM,
    PolyformerForSequenceClassification,
    PolyformerForTokenClassification,
)

__all__ = [
    "PolyformerCache",
    "PolyformerConfig",
    "PolyformerDecisionTransformer",
    "PolyformerDoubleHeadsModel",
    "PolyformerForCausalLM",
    "PolyformerForMaskedLM",
    "PolyformerForMultipleChoice",
    "PolyformerForPreTraining",
    "PolyformerForQuestionAnswering",
    "PolyformerForSeq2SeqLM",
    "PolyformerForSequenceClassification",
    "PolyformerForTokenClassification",
    "PolyformerModel",
    "wrap",
]

# The class for each kind of head; for a language model it depends on its stacks.
BY_HEAD: dict[str, type[PolyformerModel]] = {
    "embed": PolyformerModel,
    "masked": PolyformerForMaskedLM,
    "enhanced_masked": PolyformerForMaskedLM,
    "classify": PolyformerForSequenceClassification,
    "choose": PolyformerForMultipleChoice,
    "tag": PolyformerForTokenClassification,
    "span": PolyformerForQuestionAnswering,
    "pretraining": PolyformerForPreTraining,
    "detect": PolyformerForPreTraining,
}

AUTO = {
    transformers.AutoModel: PolyformerModel,
    transformers.AutoModelForPreTraining: PolyformerForPreTraining,
    transformers.AutoModelForMaskedLM: PolyformerForMaskedLM,
    transformers.AutoModelForCausalLM: PolyformerForCausalLM,
    transformers.AutoModelForSeq2SeqLM: PolyformerForSeq2SeqLM,
    transformers.AutoModelForSequenceClassification: PolyformerForSequenceClassification,
    transformers.AutoModelForTokenClassification: PolyformerForTokenClassification,
    transformers.AutoModelForMultipleChoice: PolyformerForMultipleChoice,
    transformers.AutoModelForQuestionAnswering: PolyformerForQuestionAnswering,
}


def wrap(model: Transformer | TrajectoryTransformer, *, license: str | None = None) -> PolyformerModel:
    """Return `model` as a model of transformers; the weights are shared, not copied.

    `license`, an identifier of the hub such as "apache-2.0", appears in the card of a saved model.

    Raises `InputError` for a head or a model without a class in transformers, and for quantized weights.
    """
    if not isinstance(model, Transformer | TrajectoryTransformer):
        raise InputError(f"wrap: transformers has no class for a {type(model).__name__}")
    if isinstance(model, Transformer) and model.config.weights is not None:
        raise InputError(
            f"wrap: this model's weights are {model.config.weights}, which transformers neither trains nor "
            'saves; load it with weights="float32"'
        )
    config = config_of(model)
    config.license = license
    # Only the shell; the weights are the model's.
    with torch.device("meta"):
        wrapped = _class_of(model)(config)
    wrapped.model = model
    if isinstance(model, Transformer) and wrapped.can_generate():
        wrapped.generation_config = _settings(model, wrapped.generation_config)
    return wrapped.train(model.training)


def _settings(model: Transformer, default: GenerationConfig) -> GenerationConfig:
    """Return the settings in the checkpoint's generation_config.json, or else in its config.json."""
    if model.generation is not None:
        return GenerationConfig.from_dict(dict(model.generation))
    origin = model.config.origin
    fields = {} if origin is None else origin.fields
    names = default.to_dict().keys() - {"transformers_version"}
    default.update(**{name: fields[name] for name in names if fields.get(name) is not None})
    return default


def _class_of(model: Transformer | TrajectoryTransformer) -> type[Any]:
    if isinstance(model, TrajectoryTransformer):
        return PolyformerDecisionTransformer
    kind = model.config.head.kind
    if kind in ("language_model", "adaptive_softmax"):
        if model.decoder is None:
            return PolyformerForMaskedLM
        return PolyformerForCausalLM if model.encoder is None else PolyformerForSeq2SeqLM
    if kind == "pretraining" and model.head.reads_choices:
        return PolyformerDoubleHeadsModel
    if kind not in BY_HEAD:
        raise unknown("head with a class in transformers", kind, [*BY_HEAD, "language_model"])
    return BY_HEAD[kind]


transformers.AutoConfig.register("polyformer", PolyformerConfig)
for auto, wrapper in AUTO.items():
    auto.register(PolyformerConfig, wrapper)
# The table from which the Trainer knows the models with labels to shift in label smoothing.
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["polyformer"] = PolyformerForCausalLM.__name__
