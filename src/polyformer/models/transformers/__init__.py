"""Wrappers of polyformer models for transformers: `AutoModel*`, `pipeline`, `Trainer` and PEFT accept them.

    import polyformer.models.transformers as wrapped  # registers the model_type "polyformer"
    model = wrapped.wrap(polyformer.from_pretrained(DIR))
    model.save_pretrained(OUT)                                 # for AutoModelForMaskedLM.from_pretrained

Any model can be wrapped, of a public family or not. Requires transformers (`pip install 'polyformer[hub]'`).
"""

from polyformer.models.transformers.base import PolyformerModel
from polyformer.models.transformers.cache import PolyformerCache
from polyformer.models.transformers.registration import wrap
from polyformer.models.transformers.saved_folder import PolyformerConfig
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
