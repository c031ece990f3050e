"""Wrappers of polyformer models for transformers: `AutoModel*`, `pipeline`, `Trainer` and PEFT accept them.

    import polyformer.hub                                      # registers the model_type "polyformer"
    model = polyformer.hub.wrap(polyformer.from_pretrained(DIR))
    model.save_pretrained(OUT)                                 # for AutoModelForMaskedLM.from_pretrained

Any model can be wrapped, of a public family or not. Requires transformers (`pip install 'polyformer[hub]'`).
"""

from polyformer.hub.answers import PolyformerForQuestionAnswering
from polyformer.hub.base import PolyformerModel
from polyformer.hub.cache import PolyformerCache
from polyformer.hub.config import PolyformerConfig
from polyformer.hub.registration import wrap
from polyformer.hub.tasks import (
    PolyformerDoubleHeadsModel,
    PolyformerForMaskedLM,
    PolyformerForMultipleChoice,
    PolyformerForPreTraining,
    PolyformerForSequenceClassification,
    PolyformerForTokenClassification,
)
from polyformer.hub.trajectories import PolyformerDecisionTransformer
from polyformer.hub.writers import PolyformerForCausalLM, PolyformerForSeq2SeqLM

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
